"""Attention of Gemma 3n and 4, whose last layers may read the keys and values of earlier ones."""

from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.layers.attention import Attention
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import UnitNorm, WideRmsNorm
from baton_engine.layers.normed_values import NormedValues
from baton_engine.layers.shared_kv_attention import SharedKvAttention
from baton_engine.shard import Heads, Rows, head_part
from baton_engine.source import Source

from .gemma3 import Gemma3Config


class SharedKvConfig(Gemma3Config, frozen=True, kw_only=True):
    """shared_layers: how many layers have no keys and values of their own, the last ones. input_size, input_vocab: as
    LayerInputs has them; 0 = layers have no inputs of their own."""

    shared_layers: int
    input_size: int
    input_vocab: int

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = [spec.window is None for spec in self.attention]
        if not set(kinds) <= set(kinds[: self.kv_layers]):
            raise ConfigError(
                f"num_kv_shared_layers is {self.shared_layers} of {self.num_layers} layers, which leaves no layer of "
                "the same kind whose keys and values they could share"
            )

    @property
    def kv_layers(self) -> int:
        return max(self.num_layers - self.shared_layers, 0)

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself, or the last one of its kind that has any."""
        if layer < self.kv_layers:
            return layer
        full = self.attention[layer].window is None
        return max(each for each in range(self.kv_layers) if (self.attention[each].window is None) == full)

    def fingerprint_facts(self) -> dict[str, Any]:
        facts = super().fingerprint_facts()
        return {**facts, "kv_layers": self.kv_layers} if self.shared_layers else facts

    def check_stages(self, source: Source) -> None:
        """Raise ConfigError if several stages divide layers that need more than the hidden states before them."""
        if source.stage.count > 1 and (self.shared_layers or self.input_size):
            raise ConfigError(
                "--pipeline-parallel divides the layers of a model, but layers of this one need keys and values of "
                "earlier ones, or inputs of their own: use --tensor-parallel"
            )


def attention_of(
    config: SharedKvConfig,
    source: Source,
    layer: int,
    rotary: tuple[torch.Tensor, torch.Tensor],
    shares_keys: bool = False,
) -> Attention:
    """Return the attention of a layer. config: with the heads of that layer. shares_keys: as in NormedValues."""
    hidden, dim, eps, attention = config.hidden_size, config.head_dim, config.rms_norm_eps, source.at("self_attn")
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    heads = Heads(source.ranks, dim)
    output = Linear(attention, ["o_proj"], [hidden], q, bias=config.bias, shard=Rows(source.ranks))
    q_norm, from_layer = WideRmsNorm(attention.at("q_norm"), dim, eps), config.kv_layer(layer)
    if from_layer != layer:
        queries = Linear(attention, ["q_proj"], [q], hidden, bias=config.bias, shard=heads)
        return SharedKvAttention(config, from_layer, source, queries, output, rotary, (q_norm, q_norm))
    names, sizes = ["q_proj", "k_proj", "v_proj"], [q, kv, kv]
    if shares_keys:
        names, sizes = names[:2], sizes[:2]
    projections = Linear(attention, names, sizes, hidden, bias=config.bias, shard=heads)
    own = head_part(config.num_kv_heads, source.ranks)
    qkv = NormedValues(projections, UnitNorm(source, dim, eps), (own.stop - own.start) * dim, dim, shares_keys)
    norms = q_norm, WideRmsNorm(attention.at("k_norm"), dim, eps)
    return Attention(config, layer, source, qkv, output, rotary, norms)
