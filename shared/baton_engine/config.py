"""How one engine is set up."""

import msgspec

GPU_MEMORY_UTILIZATION = 0.92
EXPORT_FRACTION = 0.75
CHUNK_MS = 28.0


class ConfigError(ValueError):
    """The model or the settings cannot be served; the message says what is wrong and what would help."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine. Sizes are in tokens unless they say otherwise; 0 = what suits the device."""

    model: str  # path of the model folder
    dtype: str = "auto"  # auto, float32, bfloat16 or float16
    device: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 0
    num_blocks: int | None = None  # None = from the memory that is free
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION  # of the device's memory, what this process may hold
    max_model_len: int | None = None  # None = what the model was made for
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    prefill_only: bool = False  # other pods decode, so that steps may be as short as lets newcomers in soon
    chunk_ms: float = CHUNK_MS  # of prompts beside decodes, longer when many are queued; 0 = any
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    deterministic: bool = False  # a token does not depend on the batch around it, at a cost
    export_fraction: float = EXPORT_FRACTION  # of the blocks, what exports may hold before the next ones wait
    set_aside_bytes: int = 0  # of the device's memory, within that part, what this process takes beside the engine
    num_threads: int | None = None  # on CPU; None = what suits the cores and the model
    engines_sharing_cpu: int | None = None  # that divide the cores, this one included; 1 = it has them alone

    def on(self, device_type: str) -> "EngineConfig":
        """Return these settings with what suits a "cpu" or "cuda" device in place of each 0.

        Raises ConfigError for what no engine can have.
        """
        # A block of 64 is what the GPU's copy engine fetches as one tile of attention.
        suits = {"block_size": 64, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
        if device_type == "cpu":
            suits = {"block_size": 16, "max_num_batched_tokens": 1024, "max_num_seqs": 128}
        if self.prefill_only:
            suits["max_num_batched_tokens"] = 256 if device_type == "cpu" else 1024
        config = msgspec.structs.replace(self, **{name: getattr(self, name) or value for name, value in suits.items()})
        config._check()
        return config

    def _check(self) -> None:
        if self.block_size < 1:
            raise ConfigError("--block-size must be at least 1")
        if self.max_num_batched_tokens < 1 or self.max_num_seqs < 1:
            raise ConfigError("--max-num-batched-tokens and --max-num-seqs must be at least 1")
        if self.chunk_ms < 0:
            raise ConfigError("--chunk-ms must be at least 0")
        if not 0 < self.export_fraction <= 1:
            raise ConfigError("--export-fraction must be above 0 and at most 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
