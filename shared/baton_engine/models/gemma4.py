"""Gemma 4, text only (Gemma Team, 2026): layers that see all tokens have fewer and larger heads than those with a
window, values are normalized, and a dense MLP may have experts beside it.

In the small sizes, the last layers have no keys and values of their own, and each layer gets an input of its own.
"""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.experts import Router, load_joined_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import UnitNorm, WideRmsNorm
from baton_engine.layers.rope import rotary_tables
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source

from .decoder import Decoder
from .gemma3 import set_softcap
from .gemma4_config import Gemma4Config, read_gemma4_config
from .layer_inputs import InputGate, LayerInputs
from .shared_kv import attention_of


class _Experts:
    """Experts of a layer whose router has a norm and a scale of its own, and a scale of each expert's results."""

    def __init__(self, config: Gemma4Config, source: Source) -> None:
        hidden, count, eps, router = config.hidden_size, config.num_experts, config.rms_norm_eps, source.at("router")
        scale = router.take("scale", (hidden,), dtype=torch.float32) * hidden**-0.5
        self._router_norm = UnitNorm(router, hidden, eps, scale)
        scales = router.take("per_expert_scale", (count,), dtype=torch.float32)
        self._router = Router(router.at("proj"), config.routing, count, hidden, scales=scales)
        self._input_norm = WideRmsNorm(source.at("pre_feedforward_layernorm_2"), hidden, eps)
        form = JoinedForm(activation=config.activation)
        self._experts = load_joined_experts(source.at("experts"), count, hidden, config.expert_size, form)
        self._ranks = source.ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden], before any norm. Returns [T, hidden]."""
        _, weights, experts = self._router(self._router_norm(x))
        return self._ranks.sum(self._experts(self._input_norm(x), weights, experts))


class Gemma4Layer:
    def __init__(
        self, config: Gemma4Config, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.mlp_size(layer), config.rms_norm_eps
        shares_keys = config.shares_keys and config.attention[layer].window is None
        self.attention = attention_of(config.of_layer(layer), source, layer, rotary, shares_keys)
        mlp, columns, rows = source.at("mlp"), Columns(source.ranks), Rows(source.ranks)
        gate_up = Linear(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden, shard=columns)
        down = Linear(mlp, ["down_proj"], [hidden], inner, shard=rows)
        self.mlp = GatedMlp(gate_up, down, config.activation)
        self.input_norm = WideRmsNorm(source.at("input_layernorm"), hidden, eps).before(self.attention)
        self.post_attention_norm = WideRmsNorm(source.at("post_attention_layernorm"), hidden, eps)
        self.pre_mlp_norm = WideRmsNorm(source.at("pre_feedforward_layernorm"), hidden, eps).before(self.mlp)
        self.post_mlp_norm = WideRmsNorm(source.at("post_feedforward_layernorm"), hidden, eps)
        self.scalar = source.take("layer_scalar", (1,))
        self.input_gate = None
        if config.input_size:
            self.input_gate = InputGate(source, config.input_size, hidden, eps, config.activation)
        self.experts = None
        if config.num_experts:
            self.experts = _Experts(config, source)
            self.mlp_norm, self.experts_norm = (
                WideRmsNorm(source.at(f"post_feedforward_layernorm_{number}"), hidden, eps) for number in (1, 2)
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
            x.add_(self.input_gate(x, given))
        return x.mul_(self.scalar)


class Gemma4(Decoder):
    def __init__(self, config: Gemma4Config, source: Source, max_positions: int) -> None:
        super().__init__(source)
        config.check_stages(source)
        inside, source = self.parts(source)
        hidden = config.hidden_size
        tables = {
            window: rotary_tables(rope, dim, max_positions, source.device)
            for window, rope, dim in (
                (False, config.rope, config.full_head_dim), (True, config.window_rope, config.head_dim)
            )
        }  # fmt: skip
        self.embedding = Embedding(inside.at("embed_tokens"), config.vocab_size, hidden, scale=hidden**0.5)
        self.layer_inputs = None
        if size := config.input_size:
            vocab, eps = config.input_vocab, config.rms_norm_eps
            self.layer_inputs = LayerInputs(inside, config.num_layers, size, vocab, hidden, eps)
        self.layers = [
            Gemma4Layer(
                config, inside.at(f"layers.{layer}"), layer, tables[config.attention[layer].window is not None]
            )
            for layer in source.stage.layers(config.num_layers)
        ]  # fmt: skip
        self.norm = WideRmsNorm(inside.at("norm"), hidden, config.rms_norm_eps)
        self.head = self.make_head(config, source)
        set_softcap(self.head, config.logit_softcap)

    @classmethod
    def read_config(cls, file: ConfigFile) -> Gemma4Config:
        return read_gemma4_config(file)

    def __call__(self, ctx: Context) -> torch.Tensor:
        x = self.begin(ctx)
        given = [None] * len(self.layers) if self.layer_inputs is None else self.layer_inputs(ctx.ids, x)
        for layer, own in zip(self.layers, given, strict=True):
            x = layer(x, ctx, own)
        return self.norm(x) if self.stage.is_last else x


class Gemma4Unified(Gemma4):
    """The text part of Gemma 4 12B, whose config.json may lack other fields."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> Gemma4Config:
        return read_gemma4_config(file, window=1024, context=262144, input_size=0)
