"""Settings of a decode pod."""

from typing import Literal

from pydantic import Field, field_validator

from baton_worker.settings import WorkerSettings

from .allowed_prefills import parse_entry


class DecodeSettings(WorkerSettings):
    """Those of every worker, and:"""

    prefill_networks: str = "127.0.0.0/8,[::1],localhost"
    """Where prefill pods are: the only networks, addresses and names to which this pod links when a gateway names an
    address, comma-separated, each with or without :port; IPv6 in brackets. A name allows itself and all addresses that
    it stands for, such as those behind a headless Service."""
    local_prefill_tokens: int = Field(default=0, ge=0)
    """Prompts of at most so many tokens are prefilled here rather than handed over."""
    kv_transport: Literal["auto", "nccl", "tcp", "grpc"] = "auto"
    """How KV comes from prefill pods: over a TCP connection of its own, over gRPC, or (nccl) the first that works of
    from GPU to GPU over NCCL, TCP and gRPC. auto is that, but where pods speak TLS it leaves NCCL out, which encrypts
    nothing."""
    kv_gpu_checksum: bool = True
    """Check KV that has come from GPU to GPU before it is used, as all else is."""
    lease_seconds: float = Field(default=30.0, gt=0, le=3_600)
    """How long a prefill pod keeps finished KV for this pod without hearing from it."""

    @field_validator("prefill_networks")
    @classmethod
    def _readable(cls, networks: str) -> str:
        for entry in networks.split(","):
            parse_entry(entry)
        return networks

    @property
    def gpu_pairs(self) -> bool:
        return self.kv_transport == "nccl" or (self.kv_transport == "auto" and self.peer_tls is None)
