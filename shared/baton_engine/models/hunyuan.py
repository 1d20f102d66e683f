"""Hunyuan 0.5B to 7B (Tencent, 2025): Llama with norms of rotated queries and keys, and a rope of a larger base."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.rope import Rope, read_rope_before_norms, rope_fields
from baton_engine.layers.rotated_norm import NormedAfterRope
from baton_engine.source import Source

from .llama import Defaults, Kind, Llama, LlamaConfig, LlamaLayer, read_llama_config

_CONTEXT = 2048
# The values with which transformers computes every model of the family.
_GIVEN = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_mla": False,
    "position_embedding_xdrope": False,
    "mlp_bias": False,
}


class HunYuanLayer(LlamaLayer):
    head_norms = ("query_layernorm", "key_layernorm")

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert rotary is not None
        output = self.attended(config, source)
        norms = self.qk_norms(config, source)
        return NormedAfterRope(config, layer, source, self.qkv(config, source), output, rotary, norms)


class HunYuan(Llama):
    layer = HunYuanLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # The fields of the models with experts are in these config.json, too.
        file.require_absent("num_experts", 1)
        return read_hunyuan_config(LlamaConfig, file)


def read_hunyuan_config(kind: type[Kind], file: ConfigFile, **facts: Any) -> Kind:
    """Return the config of a config.json with Hunyuan's fields. kind, facts: as in read_llama_config."""
    for name, value in _GIVEN.items():
        file.require_absent(name, value)
    bias, derived = file.flag("attention_bias"), file.count("hidden_size") // file.count("num_attention_heads")
    dim = file.count("head_dim", file.count("attention_head_dim", derived))
    return read_llama_config(
        kind,
        file,
        Defaults(_CONTEXT, head_dim=dim, rms_norm_eps=1e-5),
        rope=_rope(file, dim),
        qkv_bias=bias,
        output_bias=bias,
        **facts,
    )


def _rope(file: ConfigFile, dim: int) -> Rope:
    """Return the rope, whose base grows with the alpha of a dynamic scaling, however long a sequence is."""
    rope = read_rope_before_norms(file, file.count("max_position_embeddings", _CONTEXT))
    given = ConfigFile(rope_fields(file))
    alpha = given.number("alpha", 0.0)
    if not any(given.fields.get(name) in ("dynamic", "xdrope") for name in ("rope_type", "type")) or not alpha:
        return rope
    return msgspec.structs.replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2)))
