"""Settings of a decode pod."""

from typing import Literal

from pydantic import Field, field_validator

from baton_worker.settings import WorkerSettings

from .allowed_prefills import parse_entry


class DecodeSettings(WorkerSettings):
    """The settings of every worker, and those of decode pods."""

    prefill_networks: str = "127.0.0.0/8,[::1],localhost"
    """The networks, addresses and names of prefill pods, comma-separated, each with or without :port; IPv6 in brackets.
    Whatever address a gateway names, this pod links only to these. A name allows itself and all addresses that it
    resolves to, such as those behind a headless Service."""
    local_prefill_tokens: int = Field(default=0, ge=0)
    """This pod computes prompts of at most this many tokens itself, without a prefill pod."""
    kv_transport: Literal["auto", "nccl", "tcp", "grpc"] = "auto"
    """How KV comes from prefill pods. tcp: over a TCP connection of its own. grpc: over gRPC. nccl: from GPU to GPU if
    that works, else over TCP, else over gRPC. auto: as nccl, but where pods use TLS never from GPU to GPU, because NCCL
    encrypts nothing."""
    kv_gpu_checksum: bool = True
    """Compare KV that came from GPU to GPU with its checksum before it is used. All other KV is always checked."""
    lease_seconds: float = Field(default=30.0, gt=0, le=3_600)
    """Seconds that a prefill pod keeps finished KV for this pod without a message from this pod."""

    @field_validator("prefill_networks")
    @classmethod
    def _readable(cls, networks: str) -> str:
        for entry in networks.split(","):
            parse_entry(entry)
        return networks

    @property
    def gpu_pairs(self) -> bool:
        return self.kv_transport == "nccl" or (self.kv_transport == "auto" and self.peer_tls is None)
