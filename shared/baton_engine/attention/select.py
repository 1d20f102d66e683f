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
    if name not in ("auto", "torch_sdpa"):
        raise ConfigError(f"attention backend {name!r} is unknown; this model on {device.type} can use torch_sdpa")
    reason = f"fits every head size on {device.type}" if name == "auto" else "asked for"
    log.info("attention backend torch_sdpa: %s", reason, extra={"event": "attention_backend", "backend": "torch_sdpa"})
    return TorchSdpa(cache, config.num_heads, config.sliding_windows)
