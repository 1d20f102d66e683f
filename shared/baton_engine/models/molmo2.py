"""The text part of Molmo 2 (Ai2, 2025): the layers of Qwen3 or those of OLMo 3, with fused projections."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Embedding, JoinedEmbedding
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import Rope
from baton_engine.shard import Columns
from baton_engine.source import Source

from .llama import Defaults, Layer, Llama, LlamaConfig, LlamaLayer, fused_qkv, read_llama_config
from .olmo2 import NormedAfterLayer, NormedQkv

# Those of transformers' configuration class.
_DEFAULTS = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
             "num_attention_heads": 32}  # fmt: skip


class Molmo2Config(LlamaConfig, frozen=True, kw_only=True):
    """norm_after: norms are after blocks, not before. wide_norms: one norm for the queries of all heads, and one for
    all keys. scaled: the layers whose rope is scaled."""

    norm_after: bool
    wide_norms: bool
    scaled: frozenset[int]

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if layer in self.scaled else Rope("default", self.rope.theta)

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "scaled": sorted(self.scaled)}


class MolmoLayer(LlamaLayer):
    """A layer with the names of all generations of Molmo, and with ups before gates."""

    norms = ("attn_norm", "ff_norm")
    output, down = "attn_out", "ff_out"

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        return fused_qkv(config, source, "att_proj")

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        inner, shard = config.intermediate_size, Columns(source.ranks)
        # The checkpoint has ups before gates.
        order = [*range(inner, 2 * inner), *range(inner)]
        return Linear(
            source, ["ff_proj"], [2 * inner], config.hidden_size, order=order, parts=[inner, inner], shard=shard
        )


class _Molmo2Layer(MolmoLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, Molmo2Config)
        qkv = super().qkv(config, source)
        return NormedQkv(config, source, qkv) if config.wide_norms else qkv


class _Molmo2AfterLayer(_Molmo2Layer, NormedAfterLayer):
    post_norms = MolmoLayer.norms


def _layer(config: Molmo2Config, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> Layer:
    return (_Molmo2AfterLayer if config.norm_after else _Molmo2Layer)(config, source, layer, rotary)


class Molmo2(Llama):
    layer: Callable[..., Layer] = staticmethod(_layer)
    embedding_name, layers_name = "wte", "blocks"

    def make_embedding(self, config: LlamaConfig, source: Source) -> Embedding:
        return JoinedEmbedding(source, config.vocab_size, config.hidden_size)

    def make_norm(self, config: LlamaConfig, source: Source) -> RmsNorm:
        return RmsNorm(source.at("ln_f"), config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        file.require_absent("use_qk_norm", True)
        layers = file.count("num_hidden_layers")
        wide = file.choice("qk_norm_type", "qwen3", ("qwen3", "olmo")) == "olmo"
        given = file.fields.get("rope_scaling_layers")
        return read_llama_config(
            Molmo2Config,
            file,
            Defaults(36864, num_kv_heads=8, head_dim=128),
            eps=file.number("rms_norm_eps", file.number("layer_norm_eps", 1e-6)),
            qkv_bias=file.flag("attention_bias", file.flag("qkv_bias")),
            qk_norm=not wide,
            wide_norms=wide,
            norm_after=file.flag("norm_after"),
            scaled=frozenset(range(layers) if given is None else file.integers("rope_scaling_layers")),
        )
