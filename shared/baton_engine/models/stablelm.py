"""StableLM 2 and 3B (Stability AI, 2023 and 2024): Llama with LayerNorms, a quarter of each head rotated."""

from collections.abc import Callable
from typing import Any

from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import HeadLayerNorms
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source

from .layer_norm_llama import LayerNormConfig, LayerNormLayer, LayerNormLlama, head_norms
from .llama import Defaults, LlamaConfig, read_llama_config


class StableLmConfig(LayerNormConfig, frozen=True, kw_only=True):
    head_norms: bool  # LayerNorms of queries and keys, each head with weights of its own


class StableLmLayer(LayerNormLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], Any]:
        assert isinstance(config, StableLmConfig)
        qkv = super().qkv(config, source)
        if not config.head_norms:
            return qkv
        names = lambda kind, heads: [f"{kind}_layernorm.norms.{head}.weight" for head in range(heads)]  # noqa: E731
        return HeadLayerNorms(qkv, head_norms(config, source, names), config.rms_norm_eps)


class StableLm(LayerNormLlama):
    layer = StableLmLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        context, parallel = file.count("max_position_embeddings", 4096), file.flag("use_parallel_residual")
        return read_llama_config(
            StableLmConfig,
            file,
            Defaults(4096),
            eps=file.number("layer_norm_eps", 1e-5),
            rope=read_rope(file, context, partial=0.25),
            qkv_bias=file.flag("use_qkv_bias"),
            parallel=parallel,
            two_norms=not parallel,
            head_norms=file.flag("qk_layernorm"),
        )


class StableLmEpoch(StableLm):
    """StableLM 3B as it was first published, with other names in config.json."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        names = {"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"}
        own = {ours: file.fields[name] for ours, name in names.items() if name in file.fields}
        return super().read_config(ConfigFile({**file.fields, **own}))
