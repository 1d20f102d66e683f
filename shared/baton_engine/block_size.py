"""The size of blocks that a model's layers need."""

import logging

import msgspec

from .config import EngineConfig
from .device import choose_dtype, find_device
from .kv_dtype import choose_kv_dtype
from .loading import dtype_name
from .model_config import ModelConfig

log = logging.getLogger(__name__)


def with_fitting_blocks(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the config with blocks of a size that the model's layers allow (KvLayout.block_size)."""
    dtype = choose_dtype(config.dtype, model.dtype, find_device(config.device))
    layout = model.kv_layout(dtype_name(choose_kv_dtype(config.kv_cache_dtype, model, dtype)))
    size = layout.block_size(config.block_size)
    if size == config.block_size:
        return config
    log.info("blocks have %d instead of %d tokens, because the layers of this model need it", size, config.block_size)
    return msgspec.structs.replace(config, block_size=size)
