"""Qwen3-Next and Qwen3.5 (Qwen Team, 2025 and 2026): three of four layers have the states of the gated delta rule, the
others attention with gates.

The layers for multi-token prediction are not read.
"""

from typing import Any, TypeVar

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertsMethod, JoinedForm
from baton_engine.layers.experts import load_joined_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.recurrence import Delta, GatedDelta, OneProjection
from baton_engine.layers.rope import read_rope
from baton_engine.shard import Columns, Heads
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape
from baton_kernels.reference.routing import Routing

from .gated_layer import GatedLayer
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .qwen2_moe import SparseQwenLayer
from .recurrent_states import StateOrAttention, WithStates, read_delta, state_windows
from .sparse_config import SparseConfig, read_dense_layers, read_experts_per_token

# The part of a head that is rotated unless config.json says otherwise.
_ROTATED = 0.25
# Those of transformers' configuration classes.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NEXT = dict(zip(_SIZES, (151_936, 2048, 5632, 48, 16), strict=True))
_DENSE = dict(zip(_SIZES, (248_320, 4096, 12_288, 32, 16), strict=True))
_SPARSE = dict(zip(_SIZES, (248_320, 2048, 512, 40, 16), strict=True))


class Qwen35Config(WithStates, LlamaConfig, frozen=True, kw_only=True):
    state_layers: frozenset[int]
    states: StateShape | None


class Qwen3NextConfig(WithStates, SparseConfig, frozen=True, kw_only=True):
    state_layers: frozenset[int]
    states: StateShape | None


class Qwen35Layer(StateOrAttention, GatedLayer):
    state = "linear_attn"

    def make_state(self, config: Any, source: Source, layer: int) -> GatedDelta:
        shape, hidden = config.states, config.hidden_size
        compute = OneProjection(self.states_projection(shape, source, hidden), shape.part(source.ranks.count))
        return GatedDelta(source, layer, compute, shape, Delta(), hidden, config.rms_norm_eps)

    def states_projection(self, shape: StateShape, source: Source, hidden: int) -> Linear:
        """Return the projection that OneProjection takes."""
        names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
        heads = shape.value_heads
        outputs = [shape.channels, shape.values, heads, heads]
        parts = [shape.keys, shape.keys, shape.values, *outputs[1:]]
        return Linear(source, names, outputs, hidden, parts=parts, shard=Columns(source.ranks, "channels"))

    # The projection to queries also has the gates: those of a head come after its query.

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        wide, narrow = 2 * heads * dim, kv_heads * dim
        stored = [*_halves(heads, dim, 0), *range(wide, wide + 2 * narrow)]
        order = config.rope.order(heads, kv_heads, dim) or range(len(stored))
        return Linear(
            source, ["q_proj", "k_proj", "v_proj"], [wide, narrow, narrow], config.hidden_size, bias=config.qkv_bias,
            order=[stored[output] for output in order], parts=[heads * dim, narrow, narrow],
            shard=Heads(source.ranks, dim),
        )  # fmt: skip

    def attention_gates(self, config: LlamaConfig, source: Source) -> Linear:
        heads, dim = config.num_heads, config.head_dim
        return Linear(
            source, ["q_proj"], [2 * heads * dim], config.hidden_size, bias=config.qkv_bias,
            order=_halves(heads, dim, 1), parts=[heads * dim], shard=Heads(source.ranks, dim),
        )  # fmt: skip


class Qwen3NextLayer(Qwen35Layer, SparseQwenLayer):
    def states_projection(self, shape: StateShape, source: Source, hidden: int) -> Linear:
        heads, outputs = shape.value_heads, [2 * (shape.keys + shape.values), 2 * shape.value_heads]
        shared = heads // shape.key_heads
        # The checkpoint has the outputs of one key head after those of another.
        wide, narrow = (torch.arange(count).view(shape.key_heads, -1) for count in outputs)
        values = shared * shape.value_dim
        stored = torch.split(wide, [shape.key_dim, shape.key_dim, values, values], dim=1)
        of_heads = torch.split(outputs[0] + narrow, [shared, shared], dim=1)
        order = torch.cat([part.flatten() for part in (*stored, *of_heads)]).tolist()
        parts = [shape.keys, shape.keys, shape.values, shape.values, heads, heads]
        return Linear(
            source, ["in_proj_qkvz", "in_proj_ba"], outputs, hidden, order=order, parts=parts,
            shard=Columns(source.ranks, "channels"),
        )  # fmt: skip


class Qwen35MoeLayer(Qwen35Layer, SparseQwenLayer):
    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        form = JoinedForm(activation=config.activation)
        return load_joined_experts(source, config.num_experts, config.hidden_size, config.expert_size, form)


class Qwen35(Llama):
    layer = Qwen35Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return _read_config(Qwen35Config, file.with_defaults(_DENSE), 4)


class Qwen3Next(Llama):
    layer: type[Qwen35Layer] = Qwen3NextLayer
    defaults = _NEXT
    experts, used = 512, 10

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(cls.defaults)
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", cls.experts)
        return _read_config(
            Qwen3NextConfig,
            file,
            2,
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 512),
            routing=Routing(
                read_experts_per_token(file, experts, cls.used), normalize=file.flag("norm_topk_prob", True)
            ),
            shared_size=file.count("shared_expert_intermediate_size", 512),
            dense_layers=read_dense_layers(file, layers),
        )


class Qwen35Moe(Qwen3Next):
    layer = Qwen35MoeLayer
    defaults = _SPARSE
    experts, used = 256, 8


Kind = TypeVar("Kind", Qwen35Config, Qwen3NextConfig)


def _read_config(kind: type[Kind], file: ConfigFile, kv_heads: int, **facts: Any) -> Kind:
    """kv_heads: the family's default."""
    layers, context = file.count("num_hidden_layers"), file.count("max_position_embeddings", 32_768)
    file.require_absent("attn_output_gate", True)
    state_layers, shape = read_delta(file, file.count("num_key_value_heads", kv_heads), layers)
    bias = file.flag("attention_bias")
    return read_llama_config(
        kind,
        file,
        Defaults(context, num_kv_heads=kv_heads, head_dim=256),
        state_windows(state_layers, layers),
        rope=read_rope(file, context, _ROTATED),
        norm_offset=1.0,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        state_layers=state_layers,
        states=shape,
        **facts,
    )


def _halves(heads: int, dim: int, half: int) -> list[int]:
    """Return the outputs of the projection to queries and gates that are queries (0) or gates (1)."""
    return torch.arange(2 * heads * dim).view(heads, 2, dim)[:, half].flatten().tolist()
