"""Gemma 4, text only (Gemma Team, 2026): layers that see all tokens have fewer and larger heads than those with a
window, values are normalized, and a dense MLP may have experts beside it.

In the small sizes, the last layers have no keys and values of their own, and each layer gets an input of its own.
"""

import torch
from torch.nn import functional

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import JoinedForm
from baton_engine.inputs import InputRows
from baton_engine.layers.attention import Attention
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.experts import Router, load_joined_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm, UnitNorm
from baton_engine.layers.rope import rotary_tables
from baton_engine.layers.shared_kv_attention import SharedKvAttention
from baton_engine.shard import Columns, Heads, Rows, head_part
from baton_engine.source import Source

from .decoder import Decoder
from .gemma2 import soften
from .gemma4_config import Gemma4Config, read_gemma4_config


class _NormedValues:
    """A projection to queries, keys and values, with a norm without weights of each value head.

    shares_keys: the projection gives no values, which are the norms of its keys.
    """

    def __init__(self, qkv: Linear, norm: UnitNorm, size: int, dim: int, shares_keys: bool) -> None:
        """size: elements of this rank's values of a token. dim: of a head."""
        self._qkv, self._norm, self._size, self._dim = qkv, norm, size, dim
        self._shares_keys, self.inputs = shares_keys, qkv.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        qkv = self._qkv(x)
        values = self._norm(qkv[:, -self._size :].reshape(-1, self._dim)).view(-1, self._size)
        return torch.cat([qkv if self._shares_keys else qkv[:, : -self._size], values], dim=1)


class _Experts:
    """Experts of a layer whose router has a norm and a scale of its own, and a scale of each expert's results."""

    def __init__(self, config: Gemma4Config, source: Source) -> None:
        hidden, count, eps, router = config.hidden_size, config.num_experts, config.rms_norm_eps, source.at("router")
        self._router_norm = UnitNorm(router, hidden, eps)
        self._router_norm.weight = router.take("scale", (hidden,), dtype=torch.float32) * hidden**-0.5
        self._router = Router(router.at("proj"), config.routing, count, hidden)
        own = source.own_experts(count)
        self._scales = router.take("per_expert_scale", (count,), dtype=torch.float32)[own.start : own.stop]
        self._input_norm = RmsNorm(source.at("pre_feedforward_layernorm_2"), hidden, eps)
        form = JoinedForm(activation="gelu_tanh")
        self._experts = load_joined_experts(source.at("experts"), count, hidden, config.expert_size, form)
        self._ranks = source.ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden], before any norm. Returns [T, hidden]."""
        _, weights, experts = self._router(self._router_norm(x))
        # The number of an expert of another rank is below 0, and its weight is not used.
        weights = weights * self._scales[experts.clamp(min=0).long()]
        return self._ranks.sum(self._experts(self._input_norm(x), weights, experts))


class _LayerInputs:
    """What each layer gets beside the hidden states: a vector of the token, and a projection of its embedding."""

    def __init__(self, config: Gemma4Config, source: Source) -> None:
        self._size, hidden = config.input_size, config.hidden_size
        size = config.num_layers * self._size
        self._scale = hidden**-0.5
        tokens = source.at("embed_tokens_per_layer")
        self._vectors = Embedding(tokens, config.input_vocab, size, scale=self._size**0.5)
        self._projection = Linear(source, ["per_layer_model_projection"], [size], hidden)
        self._norm = RmsNorm(source.at("per_layer_projection_norm"), self._size, config.rms_norm_eps)

    def __call__(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """ids: [T] int64. x: [T, hidden], their embedding. Returns [layers, T, size]."""
        projected = self._norm(self._projection(x).mul_(self._scale).view(-1, self._size))
        both = self._vectors(ids).view_as(projected).add_(projected).mul_(0.5**0.5)
        return both.view(len(ids), -1, self._size).transpose(0, 1)


class _InputGate:
    """Adds a layer's own input to its output, as much of it as the output calls for."""

    def __init__(self, config: Gemma4Config, source: Source) -> None:
        hidden, size = config.hidden_size, config.input_size
        self._gate = Linear(source, ["per_layer_input_gate"], [size], hidden)
        self._projection = Linear(source, ["per_layer_projection"], [hidden], size)
        self._norm = RmsNorm(source.at("post_per_layer_input_norm"), hidden, config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden], which is overwritten. given: [T, size]. Returns [T, hidden]."""
        gate = functional.gelu(self._gate(x), approximate="tanh")
        return x.add_(self._norm(self._projection(gate.mul_(given))))


class Gemma4Layer:
    def __init__(
        self, config: Gemma4Config, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.mlp_size(layer), config.rms_norm_eps
        self.attention = _attention(config.of_layer(layer), source, layer, rotary)
        mlp, columns, rows = source.at("mlp"), Columns(source.ranks), Rows(source.ranks)
        gate_up = Linear(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden, shard=columns)
        self.mlp = GatedMlp(gate_up, Linear(mlp, ["down_proj"], [hidden], inner, shard=rows), "gelu_tanh")
        self.input_norm = RmsNorm(source.at("input_layernorm"), hidden, eps).before(self.attention)
        self.post_attention_norm = RmsNorm(source.at("post_attention_layernorm"), hidden, eps)
        self.pre_mlp_norm = RmsNorm(source.at("pre_feedforward_layernorm"), hidden, eps).before(self.mlp)
        self.post_mlp_norm = RmsNorm(source.at("post_feedforward_layernorm"), hidden, eps)
        self.scalar = source.take("layer_scalar", (1,))
        self.input_gate = _InputGate(config, source) if config.input_size else None
        self.experts = None
        if config.num_experts:
            self.experts = _Experts(config, source)
            self.mlp_norm, self.experts_norm = (
                RmsNorm(source.at(f"post_feedforward_layernorm_{number}"), hidden, eps) for number in (1, 2)
            )

    def __call__(self, x: torch.Tensor, ctx: Context, given: torch.Tensor | None) -> torch.Tensor:
        """given: this layer's own input, [T, size]."""
        normed, residual = self.input_norm.add(x, None)
        attended = self.post_attention_norm.later(self.attention(normed, ctx))
        normed, residual = self.pre_mlp_norm.add(attended, residual)
        x = self.mlp(normed)
        if self.experts is not None:
            x = self.mlp_norm(x) + self.experts_norm(self.experts(residual))
        x = residual.add_(self.post_mlp_norm(x))
        if self.input_gate is not None and given is not None:
            x = self.input_gate(x, given)
        return x.mul_(self.scalar)


def _attention(
    config: Gemma4Config, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
) -> Attention:
    """Return the attention of a layer. config: that of the layer."""
    hidden, dim, eps, attention = config.hidden_size, config.head_dim, config.rms_norm_eps, source.at("self_attn")
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    heads = Heads(source.ranks, dim)
    output = Linear(attention, ["o_proj"], [hidden], q, bias=config.bias, shard=Rows(source.ranks))
    q_norm = RmsNorm(attention.at("q_norm"), dim, eps)
    if config.kv_layer(layer) != layer:
        queries = Linear(attention, ["q_proj"], [q], hidden, bias=config.bias, shard=heads)
        return SharedKvAttention(
            config, config.kv_layer(layer), source, queries, output, rotary, (q_norm, q_norm)
        )  # fmt: skip
    shares_keys = config.shares_keys and config.attention[layer].window is None
    names, sizes = ["q_proj", "k_proj", "v_proj"], [q, kv, kv]
    if shares_keys:
        names, sizes = names[:2], sizes[:2]
    projections = Linear(attention, names, sizes, hidden, bias=config.bias, shard=heads)
    own = head_part(config.num_kv_heads, source.ranks)
    qkv = _NormedValues(projections, UnitNorm(source, dim, eps), (own.stop - own.start) * dim, dim, shares_keys)
    return Attention(config, layer, source, qkv, output, rotary, (q_norm, RmsNorm(attention.at("k_norm"), dim, eps)))


class Gemma4(Decoder):
    def __init__(self, config: Gemma4Config, source: Source, max_positions: int) -> None:
        super().__init__(source)
        if source.stage.count > 1 and (config.shared_layers or config.input_size):
            raise ConfigError(
                "--pipeline-parallel divides the layers of a model, but here later layers need keys and values of "
                "earlier ones, or each an input of its own: use --tensor-parallel"
            )
        inside, source = self.parts(source)
        hidden = config.hidden_size
        tables = {
            window: rotary_tables(rope, dim, max_positions, source.device)
            for window, rope, dim in (
                (False, config.rope, config.full_head_dim), (True, config.window_rope, config.head_dim)
            )
        }  # fmt: skip
        self.embedding = Embedding(inside.at("embed_tokens"), config.vocab_size, hidden, scale=hidden**0.5)
        self.layer_inputs = _LayerInputs(config, inside) if config.input_size else None
        self.layers = [
            Gemma4Layer(
                config, inside.at(f"layers.{layer}"), layer, tables[config.attention[layer].window is not None]
            )
            for layer in source.stage.layers(config.num_layers)
        ]  # fmt: skip
        self.norm = RmsNorm(inside.at("norm"), hidden, config.rms_norm_eps)
        self.head = self.make_head(config, source)
        soften(self.head, config.logit_softcap)

    @classmethod
    def read_config(cls, file: ConfigFile) -> Gemma4Config:
        return read_gemma4_config(file)

    def __call__(self, ctx: Context) -> torch.Tensor:
        x = self.embed(ctx) if ctx.received is None else ctx.received
        given = [None] * len(self.layers) if self.layer_inputs is None else self.layer_inputs(ctx.ids, x)
        for layer, own in zip(self.layers, given, strict=True):
            x = layer(x, ctx, own)
        return self.norm(x) if self.stage.is_last else x


class Gemma4Unified(Gemma4):
    """The text part of Gemma 4 12B, whose config.json may lack other fields."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> Gemma4Config:
        return read_gemma4_config(file, window=1024, context=262144, input_size=0)
