"""The settings of one engine."""

import msgspec

GPU_MEMORY_UTILIZATION = 0.92
EXPORT_FRACTION = 0.75
CHUNK_MS = 25.0


class ConfigError(ValueError):
    """The model or the settings cannot be served. The message names the problem and a remedy."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine. Sizes are in tokens unless they say otherwise; 0 = the default for the device."""

    model: str  # path of the model folder
    dtype: str = "auto"  # auto, float32, bfloat16 or float16
    quantization: str = "auto"  # auto = as the weights are stored; fp8, int8 or int4 = quantize them on load
    kv_cache_dtype: str = "auto"  # auto = the dtype of activations; fp8 = e4m3 with a scale for each head
    kv_scales: str | None = None  # file of the scales of KV in FP8; None = those of the checkpoint, or measured ones
    device: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 0
    num_blocks: int | None = None  # None = as many as fit into the free memory
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION  # fraction of the device's memory for this process
    max_model_len: int | None = None  # None = the model's default, mostly its max_position_embeddings
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    prefill_only: bool = False  # other pods decode, so each step of this engine is short and admits new prompts soon
    # Milliseconds for the prompts of a step that also decodes, more if many are queued; with prefill_only, of any step.
    # 0 = no limit.
    chunk_ms: float = CHUNK_MS
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    deterministic: bool = False  # a token does not depend on the other sequences of its batch; slower
    export_fraction: float = EXPORT_FRACTION  # fraction of the blocks that exports may hold before others must wait
    set_aside_bytes: int = 0  # device memory that this process uses outside the engine
    tensor_parallel: int = 1  # processes that divide each layer among them, each on its own GPU or all on the CPU
    expert_parallel: bool = False  # each of these has some whole experts, not a part of every expert
    symmetric_memory: bool = True  # small all-reduces read the memory of the other GPUs directly, without NCCL
    pipeline_parallel: int = 1  # stages of consecutive layers, each with tensor_parallel processes
    num_threads: int | None = None  # on CPU; None = chosen from the cores and the model
    engines_sharing_cpu: int | None = None  # number of engines that divide the cores, this one included

    def on(self, device_type: str) -> "EngineConfig":
        """Return these settings with the default for a "cpu" or "cuda" device in place of each 0.

        Raises ConfigError for a value that no engine can use.
        """
        # Attention on a GPU works on tiles of 64 keys, which TMA loads if a tile is one block.
        defaults = {"block_size": 64, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
        if device_type == "cpu":
            defaults = {"block_size": 16, "max_num_batched_tokens": 1024, "max_num_seqs": 128}
        if self.prefill_only and device_type == "cpu":
            defaults["max_num_batched_tokens"] = 256
        values = {name: getattr(self, name) or default for name, default in defaults.items()}
        config = msgspec.structs.replace(self, **values)
        config._check()
        return config

    @property
    def processes(self) -> int:
        """The number of processes that compute, each on a GPU of its own or on the CPU."""
        return self.tensor_parallel * self.pipeline_parallel

    def _check(self) -> None:
        if self.kv_scales is not None and self.kv_cache_dtype == "auto":
            raise ConfigError("--kv-scales is for --kv-cache-dtype fp8")
        if self.block_size < 1:
            raise ConfigError("--block-size must be at least 1")
        if self.max_num_batched_tokens < 1 or self.max_num_seqs < 1:
            raise ConfigError("--max-num-batched-tokens and --max-num-seqs must be at least 1")
        if self.tensor_parallel < 1 or self.pipeline_parallel < 1:
            raise ConfigError("--tensor-parallel and --pipeline-parallel must be at least 1")
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ConfigError("--expert-parallel divides experts among the ranks of --tensor-parallel, which is 1")
        if self.chunk_ms < 0:
            raise ConfigError("--chunk-ms must be at least 0")
        if not 0 < self.export_fraction <= 1:
            raise ConfigError("--export-fraction must be above 0 and at most 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
