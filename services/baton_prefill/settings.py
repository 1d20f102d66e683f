"""Settings of a prefill pod."""

from pydantic import Field

from baton_worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """The settings of every worker, and those of prefill pods."""

    kv_port: int | None = Field(default=0, ge=0, le=65535)
    """Port for decode pods that take KV over TCP; 0 = any free port, none = they take it over gRPC."""

    chunk_ms: float = Field(default=100, ge=0)
    """On GPU, the most ms that a step may take, so that a new prompt soon gets into the next step. 0 = only
    --max-num-batched-tokens limits steps."""

    @property
    def prefill_only(self) -> bool:
        return True
