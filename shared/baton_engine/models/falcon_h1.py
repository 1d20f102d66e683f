"""Falcon-H1 (TII, 2025): attention and Mamba 2 side by side in each layer, and factors of many of their numbers.

The cache has two layers for each one of the checkpoint: the keys and values, and then the state.
"""

from dataclasses import replace
from typing import Any

import msgspec
import torch

from baton_common.kv_layout import KvLayout
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.recurrence import Mamba
from baton_engine.ops import Ops
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .llama import Defaults, Layer, Llama, LlamaConfig, LlamaLayer, RotaryTables, read_llama_config
from .recurrent_states import WithStates, mamba, read_mamba, state_windows


class Factors(msgspec.Struct, frozen=True):
    """The factors of embeddings, of the inputs and of the result of attention, of Mamba's result, of the gates and of
    the result of an MLP, and of logits."""

    embeddings: float
    attention_inputs: float
    attention: float
    mamba: float
    gates: float
    mlp: float
    logits: float


class FalconH1Config(WithStates, LlamaConfig, frozen=True, kw_only=True):
    """num_layers: twice that of the checkpoint."""

    state_layers: frozenset[int]
    states: StateShape
    mamba: Mamba
    factors: Factors

    @property
    def mlp_units(self) -> float:
        """As in ModelConfig, on average over layers."""
        return self.intermediate_size / 2

    def kv_layout(self, dtype: str) -> KvLayout:
        # No stage ends between the attention and the state of a layer.
        return msgspec.structs.replace(super().kv_layout(dtype), stage_starts=_starts(self))

    def fingerprint_facts(self) -> dict[str, Any]:
        # The factor of keys is in the scale of scores.
        factors = [self.attention[0].scale, *msgspec.structs.astuple(self.factors), self.mamba.factor]
        return {**super().fingerprint_facts(), "factors": [*factors, *self.mamba.factors]}


class _Mlp:
    """A gated MLP with a factor of its gates."""

    def __init__(self, gate_up: Linear, down: Linear, factor: float, activation: str, ops: Ops) -> None:
        self._gate_up, self._down, self._factor, self._activation, self._ops = gate_up, down, factor, activation, ops
        self.inputs = gate_up.inputs

    def __call__(self, x: Any) -> torch.Tensor:
        both = self._gate_up(x)
        both[:, : both.shape[1] // 2] *= self._factor
        return self._down(self._ops.gate_mul(both, self._activation))


class FalconH1Layer(LlamaLayer):
    """layer: the number of its keys and values in the cache. That of its state is the next one."""

    blocks = ("self_attn", "feed_forward")
    norms = ("input_layernorm", "pre_ff_layernorm")

    def __init__(
        self, config: Any, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.factors = config.factors
        self.attention = self.make_attention(config, self.block(source, 0), layer, rotary)
        self.mamba = mamba(config, source.at("mamba"), layer + 1)
        # Two blocks read the result of the first norm.
        self.norm = RmsNorm(source.at(self.norms[0]), hidden, eps)
        self.mlp = self.make_mlp(config, source, layer)
        self.post_attention_norm = RmsNorm(source.at(self.norms[1]), hidden, eps).before(self.mlp)

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> _Mlp:
        assert isinstance(config, FalconH1Config)
        source = self.block(source, 1)
        down = self.down_projection(config, source)
        return _Mlp(self.gate_up(config, source), down, config.factors.gates, config.activation, source.ops)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norm.add(x, residual)
        x = self.mamba(normed, ctx).mul_(self.factors.mamba)
        attended = self.attention(normed * self.factors.attention_inputs, ctx)
        x = x.add_(attended, alpha=self.factors.attention)
        rows, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(rows).mul_(self.factors.mlp), residual


class FalconH1(Llama):
    final_norm = "final_layernorm"

    def __init__(self, config: Any, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.factors = config.factors
        self.head.finish_with(lambda logits: logits.mul_(config.factors.logits))

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).mul_(self.factors.embeddings)

    def make_layers(self, config: LlamaConfig, source: Source, rotary: RotaryTables) -> list[Layer]:
        numbers, tables = source.stage.layers(config.num_layers, _starts(config)), rotary[config.rope]
        return [FalconH1Layer(config, source.at(f"layers.{layer // 2}"), layer, tables) for layer in numbers[::2]]

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, kv_heads = 2 * file.count("num_hidden_layers"), file.count("num_key_value_heads", 8)
        inner = file.count("mamba_d_ssm", 1024) if file.fields.get("mamba_d_ssm", 1024) is not None else None
        shape, how = read_mamba(file, kv_heads, inner)
        before = file.flag("mamba_norm_before_gate", True)
        gates, mlp = _numbers(file, "mlp_multipliers", 2)
        state_layers, bias = frozenset(range(1, layers, 2)), file.flag("attention_bias")
        head_dim = file.count("head_dim", file.count("hidden_size") // file.count("num_attention_heads"))
        return read_llama_config(
            FalconH1Config,
            ConfigFile({**file.fields, "num_hidden_layers": layers}),
            Defaults(8192, num_kv_heads=8, rms_norm_eps=1e-5),
            state_windows(state_layers, layers),
            scale=head_dim**-0.5 * file.number("key_multiplier", 1.0),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
            state_layers=state_layers,
            states=shape,
            mamba=replace(
                how,
                output_bias=file.flag("projectors_bias"),
                norm=("result" if before else "gated") if file.flag("mamba_rms_norm") else "",
                factor=file.number("ssm_in_multiplier", 1.0),
                factors=_numbers(file, "ssm_multipliers", 5),
            ),
            factors=Factors(
                file.number("embedding_multiplier", 1.0),
                file.number("attention_in_multiplier", 1.0),
                file.number("attention_out_multiplier", 1.0),
                file.number("ssm_out_multiplier", 1.0),
                gates,
                mlp,
                file.number("lm_head_multiplier", 1.0),
            ),
        )


def _starts(config: LlamaConfig) -> tuple[int, ...]:
    """Return the layers of the cache that begin layers of the model."""
    return tuple(range(0, config.num_layers, 2))


def _numbers(file: ConfigFile, name: str, count: int) -> tuple[float, ...]:
    """Return the numbers of a field, by default all 1. Raises ConfigError unless there are `count` of them."""
    given = file.fields.get(name)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count or not all(isinstance(each, int | float) for each in given):
        raise ConfigError(f"{name} in config.json is {given!r}; it must be a list of {count} numbers")
    return tuple(map(float, given))
