"""Llama with LayerNorms in place of RMSNorms, the base of several families."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.layers.embedding import Head, head
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import Mlp
from baton_engine.layers.norm import HeadLayerNorms, LayerNorm
from baton_engine.shard import Columns, Rows, head_part
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS, Activation

from .llama import Layer, Llama, LlamaConfig, LlamaLayer
from .sparse_config import SparseConfig


class LayerNorms:
    """A part of the config of a model with LayerNorms.

    norm_weight, norm_bias: whether LayerNorms have them. parallel: the MLP reads the input of attention instead of its
    output. two_norms: attention and MLP have separate norms.
    """

    hidden_size: int
    rms_norm_eps: float
    norm_offset: float
    norm_weight: bool
    norm_bias: bool
    parallel: bool
    two_norms: bool

    def norm(self, source: Source) -> LayerNorm:
        return LayerNorm(
            source, self.hidden_size, self.rms_norm_eps, weight=self.norm_weight, bias=self.norm_bias,
            offset=self.norm_offset,
        )  # fmt: skip


class LayerNormConfig(LayerNorms, LlamaConfig, frozen=True, kw_only=True):
    norm_weight: bool = True
    norm_bias: bool = True
    parallel: bool = False
    two_norms: bool = True


class SparseLayerNormConfig(LayerNorms, SparseConfig, frozen=True, kw_only=True):
    norm_weight: bool = True
    norm_bias: bool = True
    parallel: bool = False
    two_norms: bool = True


class LayerNormLayer(LlamaLayer):
    def __init__(
        self, config: Any, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        self.attention = self.make_attention(config, self.block(source, 0), layer, rotary)
        self.mlp = self.make_mlp(config, source, layer)
        self.attention_norm = self.make_attention_norm(config, source, layer)
        self.mlp_norm = config.norm(source.at(self.norms[1])) if config.two_norms else None
        self.parallel = config.parallel

    def make_attention_norm(self, config: Any, source: Source, layer: int) -> Any:
        """Return the norm before attention."""
        return config.norm(source.at(self.norms[0]))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.attention_norm.add(x, residual)
        x = self.attention(normed, ctx)
        if self.parallel:
            normed = normed if self.mlp_norm is None else self.mlp_norm(residual)
            return self.mlp(normed).add_(x), residual
        assert self.mlp_norm is not None
        normed, residual = self.mlp_norm.add(x, residual)
        return self.mlp(normed), residual


class PostNorm:
    """A part of a layer whose LayerNorms follow the residual additions, as in the first Transformer."""

    attention: Callable[..., torch.Tensor]
    mlp: Callable[[Any], torch.Tensor]
    attention_norm: LayerNorm
    mlp_norm: LayerNorm | None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context) -> tuple[Any, Any]:
        """As LlamaLayer does. Nothing is left for the next norm to add."""
        assert self.mlp_norm is not None
        x = self.attention_norm(self.attention(x, ctx).add_(x))
        return self.mlp_norm(self.mlp(x).add_(x)), None


class PlainMlpLayer(LayerNormLayer):
    """A layer whose MLP has no gates. projections: the names of its two."""

    projections = ("fc1", "fc2")

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        return plain_mlp(config, self.block(source, 1), self.projections)


def plain_mlp(
    config: LlamaConfig, source: Source, names: tuple[str, str], activation: Activation | None = None, **stored: Any
) -> Mlp:
    """Return an MLP without gates. names: of its projections. activation: None = that of the config. stored: how the
    weights are stored, as in Linear."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    up = Linear(source, [names[0]], [inner], hidden, bias=bias, shard=Columns(source.ranks), **stored)
    down = Linear(source, [names[1]], [hidden], inner, bias=bias, shard=Rows(source.ranks), **stored)
    return Mlp(up, down, activation or ACTIVATIONS[config.activation])


class LayerNormLlama(Llama):
    """head_bias: whether the head has a bias."""

    layer: Callable[..., Layer] = LayerNormLayer
    head_bias = False

    def make_head(self, config: LlamaConfig, source: Source) -> Head:
        return head(source, self.embedding, config.tie_word_embeddings, self.head_name, self.head_bias)

    def make_norm(self, config: LlamaConfig, source: Source) -> LayerNorm:
        assert isinstance(config, LayerNorms)
        return config.norm(source.at(self.final_norm))


def head_norms(config: LlamaConfig, source: Source, names: Callable[[str, int], str | list[str]]) -> torch.Tensor:
    """Return the weights of LayerNorms of this rank's query and key heads, as HeadLayerNorms takes them.

    names: gives for "q" or "k" and so many heads the tensor of each, [head_dim], or that of all, [heads, head_dim].
    """
    weights = []
    for kind, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        taken = names(kind, heads)
        if isinstance(taken, str):
            weight = source.take(taken, (heads, config.head_dim), dtype=torch.float32)
        else:
            weight = torch.stack([source.take(name, (config.head_dim,), dtype=torch.float32) for name in taken])
        weights.append(weight[head_part(heads, source.ranks)])
    joined = torch.cat(weights)
    order = config.rope.order(1, 0, config.head_dim)
    return joined if order is None else joined[:, order]


def with_shared_head_norms(config: LlamaConfig, source: Source, qkv: Callable[[Any], torch.Tensor]) -> HeadLayerNorms:
    """Return a projection with a LayerNorm that all query heads share, and one that all key heads share."""
    dim, order = config.head_dim, config.rope.order(1, 0, config.head_dim)
    parts = []
    for part in ("weight", "bias"):
        rows = []
        for kind, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            own = head_part(heads, source.ranks)
            row = source.take(f"{kind}_layernorm.{part}", (dim,), dtype=torch.float32)
            rows.append(row.expand(own.stop - own.start, dim))
        joined = torch.cat(rows)
        parts.append(joined if order is None else joined[:, order])
    return HeadLayerNorms(qkv, parts[0], config.rms_norm_eps, parts[1])
