"""Settings that prefill and decode pods share. Each can be given as a flag, or as BATON_… in the environment."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from baton_common.peer_settings import PeerSettings
from baton_engine.config import CHUNK_MS, EXPORT_FRACTION, GPU_MEMORY_UTILIZATION, EngineConfig


class WorkerSettings(PeerSettings):
    model_config = SettingsConfigDict(
        env_prefix="BATON_", cli_kebab_case=True, cli_implicit_flags=True, use_attribute_docstrings=True
    )

    model: Path
    """Hugging Face model folder: config.json, safetensors, a tokenizer. Or its id on a hub: owner/name, or
    owner/name@revision."""
    served_model_name: str = ""
    """Model name that clients use; empty = the folder's name, or owner/name."""
    revision: str = "stable"
    """Revision that this pod belongs to. Prefill and decode pods are paired only within a revision."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """gRPC port; 0 = any free port."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for Prometheus and the probes /live and /ready, at the same address; 0 = any free, none = no such port."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """Data type of weights, and of KV by default: auto (float32 on CPU, the checkpoint's own on GPU), float32, bfloat16
    or float16."""
    quantization: str = "auto"
    """How weights are quantized: auto (as they are stored), or fp8, int8 or int4 to quantize 16-bit weights on load."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of the KV: auto (that of --dtype), or fp8 (e4m3 with a scale for each head, from the checkpoint or
    measured at start), which holds twice as many tokens as 16 bits. Must be the same on prefill and decode pods."""
    kv_scales: str | None = None
    """File of the scales of KV in FP8, as `baton model kv-scales` writes it, for pods that would measure different
    ones, for example on different kinds of GPUs. By default the checkpoint's scales, or measured ones."""
    attention_backend: str = "auto"
    """auto, hopper, triton or torch_sdpa."""
    block_size: int = Field(default=0, ge=0)
    """Tokens per KV block; 0 = 64 on GPU, 16 on CPU."""
    num_blocks: int | None = Field(default=None, ge=1)
    """Number of KV blocks; by default they take the rest of --gpu-memory-utilization, on CPU 1 GiB."""
    gpu_memory_utilization: float = Field(default=GPU_MEMORY_UTILIZATION, gt=0, le=1)
    """Part of the GPU's memory that this process may hold: weights, the largest step, CUDA graphs, GPU pairs, KV
    blocks."""
    gpu_pair_memory: float = Field(default=0.06, ge=0, le=0.5)
    """Part of the GPU's memory that connections to other pods' GPUs may hold, within --gpu-memory-utilization; it
    limits how many connections there are. 0 = none: KV goes through the host."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest sequence, prompt and output together, in tokens; by default the length that the model was made for."""
    max_num_batched_tokens: int = Field(default=0, ge=0)
    """The most tokens that one engine step computes; 0 = 8192 on GPU and 1024 on CPU, on prefill pods 256 on CPU."""
    max_num_seqs: int = Field(default=0, ge=0)
    """The most sequences that one engine step computes; 0 = 256 on GPU, 128 on CPU."""
    chunk_ms: float = Field(default=CHUNK_MS, ge=0)
    """On GPU, how many ms the prompts in a step may delay its decodes. While several prompts are queued, the limit is
    up to four times as long. It is up to eight times as long if the queue, without its longest prompt, would otherwise
    take more than 24 steps. 0 = only --max-num-batched-tokens limits prompts."""
    enable_prefix_caching: bool = True
    """Keep the KV of finished sequences for later ones that begin with the same tokens."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    deterministic: bool = False
    """On GPU, make the tokens of a request independent of the other requests in its batch. This costs speed."""
    export_fraction: float = Field(default=EXPORT_FRACTION, gt=0, le=1)
    """Part of the KV blocks that computed prompts may hold until decode pods have their KV. Beyond it, prompts wait."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that divide each layer of the model among them, each on its own GPU, or all on the CPU. The number of
    attention heads must be a multiple of it."""
    expert_parallel: bool = False
    """Give each of these processes some whole experts of a mixture of experts, instead of a part of every expert.
    Attention is divided as without this flag."""
    symmetric_memory: bool = True
    """All-reduce small messages, such as those of decode steps, through memory that all GPUs of the pod read, where
    that is faster than NCCL. Up to which size it is faster is measured at start."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Stages of consecutive layers, each with --tensor-parallel processes. Stages send only hidden states to each
    other, which suits GPUs with slow connections."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of the engine on CPU; by default chosen from its cores and the size of the model's layers."""
    engines_sharing_cpu: int | None = Field(default=None, ge=1)
    """How many engine processes share the CPU cores, this one included. 1: this one has all cores, and its threads may
    spin while they wait. By default it uses all cores, and its threads sleep while they wait, because other processes
    may need the cores."""
    engine_timeout_s: float = Field(default=300, gt=0)
    """The pod exits, in order to be restarted, after this many seconds without a message from its engine."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """Seconds that running requests may take to finish after SIGTERM."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector that gets traces, over gRPC: http://host:4317. Empty: no traces."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    @property
    def gpu_pairs(self) -> bool:
        """Whether KV may go from GPU to GPU."""
        return True

    @property
    def prefill_only(self) -> bool:
        """Whether this pod only prefills prompts, which other pods then decode."""
        return False

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    def engine_config(self) -> EngineConfig:
        names, ours = EngineConfig.__struct_fields__, {"model", "set_aside_bytes"}
        return EngineConfig(**{name: getattr(self, name) for name in names if name not in ours}, model=str(self.model))
