"""Settings of a prefill pod."""

from pydantic import Field

from baton_worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Those of every worker, and:"""

    kv_port: int | None = Field(default=0, ge=0, le=65535)
    """Port from which decode pods take KV over TCP; 0 = any free one, none = they take it over gRPC."""

    @property
    def prefill_only(self) -> bool:
        return True
