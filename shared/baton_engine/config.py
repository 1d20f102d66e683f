"""How one engine is set up."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine. Sizes are in tokens unless they say otherwise."""

    model: str  # path of the model folder
    dtype: str = "auto"  # auto, float32, bfloat16 or float16
    device: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None  # None = from the memory that is free
    max_model_len: int | None = None  # None = what the model was made for
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 128
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    num_threads: int | None = None  # of torch on CPU; None = all cores


class ConfigError(ValueError):
    """The model or the settings cannot be served; the message says what is wrong and what would help."""
