"""Which attention backend an engine uses, and why."""

import logging

import torch

from baton_engine.config import ConfigError
from baton_engine.kv_cache import KvCache
from baton_engine.model_config import ModelConfig

from .backend import AttentionBackend
from .torch_sdpa import TorchSdpa

log = logging.getLogger(__name__)


def select_backend(name: str, config: ModelConfig, cache: KvCache, device: torch.device) -> AttentionBackend:
    """Return the backend called `name`, or with "auto" the best one for this model and device, and log the reason."""
    usable = ["triton", "torch_sdpa"] if device.type == "cuda" else ["torch_sdpa"]
    if name not in ("auto", *usable):
        raise ConfigError(
            f"attention backend {name!r} cannot run this model on {device.type}: use {' or '.join(usable)}"
        )
    chosen = usable[0] if name == "auto" else name
    reasons = {"triton": "reads the paged cache in place", "torch_sdpa": f"fits every head size on {device.type}"}
    reason = reasons[chosen] if name == "auto" else "asked for"
    log.info("attention backend %s: %s", chosen, reason, extra={"event": "attention_backend", "backend": chosen})
    if chosen == "triton":
        from .triton_paged import TritonPaged

        return TritonPaged(cache, config.num_heads, config.sliding_windows)
    return TorchSdpa(cache, config.num_heads, config.sliding_windows)
