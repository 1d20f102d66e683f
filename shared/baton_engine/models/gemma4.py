"""Gemma 4, text only (Gemma Team, 2026): layers that see all tokens have fewer and larger heads than those with a
window, values are normalized, and a dense MLP may have experts beside it."""

from typing import Any, Self

import msgspec
import torch

from baton_common.kv_layout import KvLayout
from baton_engine.attention_spec import AttentionSpec
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
from baton_engine.shard import Columns, Heads, Place, Rows, head_part
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .decoder import Decoder
from .gemma2 import soften
from .gemma3 import Gemma3Config, read_gemma_config
from .sliding_windows import ropes_by_window

_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


class Gemma4Config(Gemma3Config, frozen=True, kw_only=True):
    """num_kv_heads, head_dim: of layers with a window. full_kv_heads, full_head_dim: of the others. shares_keys: the
    values of the others are their keys before the norm. expert_size: 0 = no layer has experts."""

    full_kv_heads: int
    full_head_dim: int
    shares_keys: bool
    logit_softcap: float
    expert_size: int = 0
    routing: Routing = Routing(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads % self.full_kv_heads:
            raise ConfigError(
                f"{self.full_kv_heads} key-value heads of layers that see all tokens do not divide the "
                f"{self.num_kv_heads} of layers with a window"
            )
        if self.full_head_dim % 2:
            raise ConfigError(f"global_head_dim is {self.full_head_dim}; it must be even")

    @property
    def head_dims(self) -> tuple[int, ...]:
        return tuple({self.head_dim: None, self.full_head_dim: None})

    @property
    def layer_weights(self) -> int:
        """As in ModelConfig, for a layer with a window, as most are."""
        return super().layer_weights + self._expert_weights(self.routing.count)

    def layer_weights_read(self, tokens: float) -> float:
        """As in ModelConfig, for a layer with a window and tokens that use all experts equally often."""
        used = 1 - (1 - self.routing.count / self.num_experts) ** tokens if self.num_experts else 0.0
        return super().layer_weights + self._expert_weights(self.num_experts * used)

    @property
    def mlp_units(self) -> float:
        return self.intermediate_size + (self.routing.count * self.expert_size if self.num_experts else 0)

    def of_layer(self, layer: int) -> Self:
        """Return the config with the heads of a layer as those of all."""
        if self.attention[layer].window is not None:
            return self
        return msgspec.structs.replace(self, num_kv_heads=self.full_kv_heads, head_dim=self.full_head_dim)

    def part(self, ranks: Place) -> Self:
        if ranks.count > self.full_kv_heads:
            # A head of the cache would be on two ranks in layers of one kind and on one rank in those of the other.
            raise ConfigError(
                f"--tensor-parallel {ranks.count} is more than the {self.full_kv_heads} key-value heads of layers that "
                "see all tokens"
            )
        heads = head_part(self.full_kv_heads, ranks, "key-value heads")
        fewer = msgspec.structs.replace(self, full_kv_heads=heads.stop - heads.start)
        return super(Gemma4Config, fewer).part(ranks)

    def layout(self) -> dict[str, Any]:
        return {**super().layout(), "full_heads": [self.full_kv_heads, self.full_head_dim]}

    def kv_layout(self, dtype: str) -> KvLayout:
        whole = super().kv_layout(dtype)
        dim = max(self.head_dim, -(-self.full_kv_heads * self.full_head_dim // self.num_kv_heads))
        each = (self.of_layer(layer) for layer in range(self.num_layers))
        return msgspec.structs.replace(
            whole,
            planes=tuple(msgspec.structs.replace(plane, dim=dim) for plane in whole.planes),
            heads=tuple((config.num_kv_heads, config.head_dim) for config in each),
        )

    def _expert_weights(self, experts: float) -> int:
        """Return the elements of a layer's router and of so many of its experts."""
        return round(self.hidden_size * (self.num_experts + 3 * experts * self.expert_size)) if self.num_experts else 0


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


class Gemma4Layer:
    def __init__(
        self, config: Gemma4Config, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.attention = _attention(config.of_layer(layer), source, layer, rotary)
        mlp, columns, rows = source.at("mlp"), Columns(source.ranks), Rows(source.ranks)
        gate_up = Linear(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden, shard=columns)
        self.mlp = GatedMlp(gate_up, Linear(mlp, ["down_proj"], [hidden], inner, shard=rows), "gelu_tanh")
        self.input_norm = RmsNorm(source.at("input_layernorm"), hidden, eps).before(self.attention)
        self.post_attention_norm = RmsNorm(source.at("post_attention_layernorm"), hidden, eps)
        self.pre_mlp_norm = RmsNorm(source.at("pre_feedforward_layernorm"), hidden, eps).before(self.mlp)
        self.post_mlp_norm = RmsNorm(source.at("post_feedforward_layernorm"), hidden, eps)
        self.scalar = source.take("layer_scalar", (1,))
        self.experts = None
        if config.num_experts:
            self.experts = _Experts(config, source)
            self.mlp_norm, self.experts_norm = (
                RmsNorm(source.at(f"post_feedforward_layernorm_{number}"), hidden, eps) for number in (1, 2)
            )

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        normed, residual = self.input_norm.add(x, None)
        attended = self.post_attention_norm.later(self.attention(normed, ctx))
        normed, residual = self.pre_mlp_norm.add(attended, residual)
        x = self.mlp(normed)
        if self.experts is not None:
            x = self.mlp_norm(x) + self.experts_norm(self.experts(residual))
        return residual.add_(self.post_mlp_norm(x)).mul_(self.scalar)


def _attention(
    config: Gemma4Config, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
) -> Attention:
    """Return the attention of a layer. config: that of the layer."""
    shares_keys = config.shares_keys and config.attention[layer].window is None
    hidden, dim, eps, attention = config.hidden_size, config.head_dim, config.rms_norm_eps, source.at("self_attn")
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    names, sizes = ["q_proj", "k_proj", "v_proj"], [q, kv, kv]
    if shares_keys:
        names, sizes = names[:2], sizes[:2]
    projections = Linear(attention, names, sizes, hidden, bias=config.bias, shard=Heads(source.ranks, dim))
    output = Linear(attention, ["o_proj"], [hidden], q, bias=config.bias, shard=Rows(source.ranks))
    heads = head_part(config.num_kv_heads, source.ranks)
    size = (heads.stop - heads.start) * dim
    qkv = _NormedValues(projections, UnitNorm(source, dim, eps), size, dim, shares_keys)
    norms = RmsNorm(attention.at("q_norm"), dim, eps), RmsNorm(attention.at("k_norm"), dim, eps)
    return Attention(config, layer, source, qkv, output, rotary, norms)


class Gemma4(Decoder):
    def __init__(self, config: Gemma4Config, source: Source, max_positions: int) -> None:
        super().__init__(source)
        inside, source = self.parts(source)
        hidden = config.hidden_size
        tables = {
            window: rotary_tables(rope, dim, max_positions, source.device)
            for window, rope, dim in (
                (False, config.rope, config.full_head_dim), (True, config.window_rope, config.head_dim)
            )
        }  # fmt: skip
        self.embedding = Embedding(inside.at("embed_tokens"), config.vocab_size, hidden, scale=hidden**0.5)
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
        for name, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
            if file.integer(name, default):
                raise ConfigError(
                    f"{name} {file.integer(name, default)} in config.json is not served for {file.architecture}"
                )
        layers, context = file.count("num_hidden_layers", 30), file.count("max_position_embeddings", 131072)
        window, types = file.count("sliding_window", 512), _layer_types(file, layers)
        full_kv_heads, full_head_dim = _full_heads(file, types)
        file = ConfigFile({**file.fields, "rope_parameters": file.fields.get("rope_parameters") or _ROPES})
        rope, window_rope = ropes_by_window(file, context, 1e6, 1e4)
        experts: dict[str, Any] = {}
        if file.flag("enable_moe_block"):
            count = file.count("num_experts")
            chosen = file.at_most("top_k_experts", count, count)
            experts = {"num_experts": count, "expert_size": file.count("moe_intermediate_size")}
            experts["routing"] = Routing(chosen, normalize=True)
        # Images see each other in both directions, and texts do not.
        text = {name: value for name, value in file.fields.items() if (name, value) != _IMAGES}
        return read_gemma_config(
            Gemma4Config,
            ConfigFile(text),
            context,
            vocab_size=file.count("vocab_size", 262144),
            attention=tuple(
                AttentionSpec(scale=1.0, window=window if kind == "sliding_attention" else None) for kind in types
            ),
            rope=rope,
            window_rope=window_rope,
            qk_norm=True,
            full_kv_heads=full_kv_heads,
            full_head_dim=full_head_dim,
            shares_keys=file.flag("attention_k_eq_v"),
            logit_softcap=file.number("final_logit_softcapping", 0.0),
            **experts,
        )


_IMAGES = ("use_bidirectional_attention", "vision")


def _layer_types(file: ConfigFile, layers: int) -> list[str]:
    """Return the kind of each layer. The last one always sees all tokens."""
    types = file.layer_types("layer_types", layers) or [
        "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)
    ]
    return [*types[:-1], "full_attention"]


def _full_heads(file: ConfigFile, types: list[str]) -> tuple[int, int]:
    """Return the number of key-value heads of layers that see all tokens, and their dim.

    transformers writes them as per_layer_config, by the number of each such layer.
    """
    kv_heads, shares_keys = file.count("num_key_value_heads", 4), file.flag("attention_k_eq_v")
    if file.fields.get("per_layer_config") is None:
        own = file.count("num_global_key_value_heads", kv_heads) if shares_keys else kv_heads
        return own, file.count("global_head_dim", 512)
    given, head_dim = file.part("per_layer_config"), file.count("head_dim", 256)
    full = [given.part(str(layer)) for layer, kind in enumerate(types) if kind == "full_attention"]
    each = {(layer.count("num_key_value_heads", kv_heads), layer.count("head_dim", head_dim)) for layer in full}
    named = {name for name in given.fields if name != "architectures"}
    if len(each) > 1 or len(named) > len(full):
        raise ConfigError("per_layer_config in config.json must give all layers that see all tokens the same heads")
    return each.pop()
