"""Zamba2 (Zyphra, 2024): layers of Mamba 2. In some of them, a transformer block adds its result to Mamba's input.

A model has one or a few such blocks, which take turns. A block is computed in several layers with the same weights, but
in each of them it has adapters, a last projection, and keys and values of its own. It reads the hidden states and,
beside them, the embeddings. So the cache has two layers for such a layer of the checkpoint: the keys and values, and
then the state.

The steps of Mamba have any length, as in training. transformers bounds those of a prompt from below (time_step_min),
but not those of the tokens that it generates. Then the same text would have other states as a prompt than as an answer,
and a cached prefix or a resumed answer would change tokens.
"""

from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.adapted_projection import AdaptedProjection
from baton_engine.layers.attention import Attention
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.recurrence import Mamba, Mamba2
from baton_engine.shard import Columns, Heads, Rows
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .llama import Defaults, Llama, LlamaConfig, RotaryTables, read_llama_config
from .phi3 import fused_gate_up
from .recurrent_states import WithStates, read_mamba, state_windows
from .rotary_config import MaybeRotates

# The kinds of layers in config.json: Mamba alone, by two names, and Mamba with a transformer block.
_HYBRID = "hybrid"
_KINDS = ("linear_attention", "mamba", _HYBRID)
# Of the norm in Mamba. It does not depend on config.json.
_MAMBA_EPS = 1e-5
# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 2560, "num_hidden_layers": 54, "num_attention_heads": 32, "n_mamba_heads": 8,
}  # fmt: skip


class Zamba2Config(WithStates, MaybeRotates, LlamaConfig, frozen=True, kw_only=True):
    """num_layers: those of the cache. hybrid: for each layer of the checkpoint, whether it has a transformer block.
    blocks: how many of these have weights of their own. rank: of adapters. adapts_attention: queries, keys and values
    have adapters, not only MLPs."""

    rotates: bool
    state_layers: frozenset[int]
    states: StateShape
    mamba: Mamba
    hybrid: tuple[bool, ...]
    blocks: int
    rank: int
    adapts_attention: bool

    @property
    def mlp_units(self) -> float:
        """As in ModelConfig, on average over layers."""
        return self.intermediate_size * sum(self.hybrid) / self.num_layers

    @property
    def projections(self) -> list[tuple[int, int]]:
        (outputs, inputs), last = super().projections
        return [(outputs, 2 * inputs), last]


class _SharedBlock:
    """What the uses of a transformer block share. source: of the block in the first layer that has it."""

    def __init__(self, config: Zamba2Config, source: Source) -> None:
        hidden, eps, inner, bias = config.hidden_size, config.rms_norm_eps, config.intermediate_size, config.mlp_bias
        self._config, self._attention, self._mlp = config, source.at("self_attn"), source.at("feed_forward")
        dim, ranks = config.head_dim, source.ranks
        self._sizes = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        self._heads = Heads(ranks, dim)
        self._output = Linear(self._attention, ["o_proj"], [hidden], self._sizes[0], shard=Rows(ranks))
        names = [f"{part}_proj" for part in "qkv"]
        self._qkv = Linear(self._attention, names, self._sizes, 2 * hidden, shard=self._heads)
        self._down = Linear(self._mlp, ["down_proj"], [hidden], inner, bias=bias, shard=Rows(ranks))
        self._gate_up = fused_gate_up(config, self._mlp)
        self.input_norm = RmsNorm(source.at("input_layernorm"), 2 * hidden, eps)
        self.pre_mlp_norm = RmsNorm(source.at("pre_ff_layernorm"), hidden, eps)

    def attention(self, use: int, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> Attention:
        """Return the attention of a use of any block, by its number: [T, 2 * hidden] to [T, hidden]. layer: of its keys
        and values."""
        config, source = self._config, self._attention
        if not config.adapts_attention:
            return Attention(config, layer, source, self._qkv, self._output, rotary)
        names = [f"linear_{part}_adapter_list.{use}" for part in "qkv"]
        down = Linear(source, [f"{name}.0" for name in names], [config.rank] * 3, 2 * config.hidden_size)
        up = [
            Linear(source, [f"{name}.1"], [size], config.rank, shard=self._heads)
            for name, size in zip(names, self._sizes, strict=True)
        ]
        return Attention(config, layer, source, AdaptedProjection(source, self._qkv, down, up), self._output, rotary)

    def mlp(self, use: int) -> GatedMlp:
        """Return the MLP of a use."""
        config, source, name = self._config, self._mlp, f"gate_up_proj_adapter_list.{use}"
        inner = config.intermediate_size
        down = Linear(source, [f"{name}.0"], [config.rank], config.hidden_size)
        up = Linear(
            source, [f"{name}.1"], [2 * inner], config.rank, parts=[inner, inner], shard=Columns(source.ranks)
        )  # fmt: skip
        return GatedMlp(AdaptedProjection(source, self._gate_up, down, [up]), self._down, config.activation)


class _MambaLayer:
    """layer: the number of its state in the cache."""

    def __init__(self, config: Zamba2Config, source: Source, layer: int) -> None:
        hidden = config.hidden_size
        self.mamba = Mamba2(source.at("mamba"), layer, config.states, config.mamba, hidden, _MAMBA_EPS)
        self.norm = RmsNorm(source.at("input_layernorm"), hidden, config.rms_norm_eps).before(self.mamba)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what Layer returns. embedded: [T, hidden], the embeddings."""
        normed, residual = self.norm.add(x, residual)
        return self.mamba(normed, ctx), residual


class _HybridLayer(_MambaLayer):
    """layer: the number of its keys and values in the cache. That of its state is the next one. use: how many layers
    before this one have a transformer block."""

    def __init__(
        self, config: Zamba2Config, source: Source, layer: int, block: _SharedBlock, use: int,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:  # fmt: skip
        super().__init__(config, source.at("mamba_decoder"), layer + 1)
        self.attention, self.mlp = block.attention(use, layer, rotary), block.mlp(use)
        self.input_norm = block.input_norm.before(self.attention)
        self.pre_mlp_norm = block.pre_mlp_norm.before(self.mlp)
        self.last = Linear(source, ["linear"], [config.hidden_size], config.hidden_size)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else residual.add_(x)
        attended = self.attention(self.input_norm(torch.cat([total, embedded], dim=1)), ctx)
        added = self.last(self.mlp(self.pre_mlp_norm(attended)))
        return self.mamba(self.norm(total + added), ctx), total


class Zamba2(Llama):
    final_norm = "final_layernorm"

    def __init__(self, config: LlamaConfig, source: Source, max_positions: int) -> None:
        if source.stage.count > 1:
            raise ConfigError(
                "--pipeline-parallel divides the layers of a model, but many layers of this one need the embeddings, "
                "and share weights: use --tensor-parallel"
            )
        super().__init__(config, source, max_positions)

    def make_layers(self, config: Any, source: Source, rotary: RotaryTables) -> list[Any]:
        tables, layers = rotary[config.rope_of(0)], source.at(self.layers_name)
        places = [place for place, hybrid in enumerate(config.hybrid) if hybrid]
        blocks = [_SharedBlock(config, layers.at(f"{place}.shared_transformer")) for place in places[: config.blocks]]
        made: list[_MambaLayer] = []
        uses = 0
        for place, hybrid in enumerate(config.hybrid):
            inside, number = layers.at(f"{place}"), place + uses
            if hybrid:
                made.append(_HybridLayer(config, inside, number, blocks[uses % len(blocks)], uses, tables))
                uses += 1
            else:
                made.append(_MambaLayer(config, inside, number))
        return made

    def __call__(self, ctx: Context) -> torch.Tensor:
        embedded = self.begin(ctx)
        # Layers overwrite the first of these.
        x: Any = embedded.clone()
        residual: Any = None
        for layer in self.layers:
            x, residual = layer(x, residual, ctx, embedded)
        return self.norm.add(x, residual)[0]

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        hidden, heads, mamba_heads = (
            file.count(name) for name in ("hidden_size", "num_attention_heads", "n_mamba_heads")
        )
        kv_heads, adapts = file.count("num_key_value_heads", heads), file.flag("use_shared_attention_adapter")
        if 2 * hidden % heads:
            raise ConfigError(f"twice hidden_size {hidden} in config.json is not a multiple of the {heads} heads")
        if adapts and kv_heads != heads:
            raise ConfigError(
                f"use_shared_attention_adapter in config.json needs as many key-value heads as heads, {heads}, but "
                f"num_key_value_heads is {kv_heads}"
            )
        kinds = file.layer_types("layers_block_type", file.count("num_hidden_layers"), _KINDS)
        if kinds is None:
            raise ConfigError("config.json has no 'layers_block_type'")
        hybrid, dim = tuple(kind == _HYBRID for kind in kinds), 2 * hidden // heads
        # transformers computes these, and lets config.json replace them.
        for name, computed in {
            "hybrid_layer_ids": [place for place, has_block in enumerate(hybrid) if has_block],
            "attention_hidden_size": 2 * hidden, "attention_head_dim": dim,
            "mamba_headdim": file.count("mamba_expand", 2) * hidden // mamba_heads,
        }.items():  # fmt: skip
            file.require_absent(name, computed)
        file.require_absent("use_conv_bias", True)
        # Where embeddings and head differ, layers of transformers do not share blocks either.
        file.require_absent("tie_word_embeddings", True)
        # Earlier versions of transformers scale the rope for it, later ones do not.
        file.require_absent("use_long_context", False)
        bias = file.flag("add_bias_linear")
        given = {
            "mamba_n_heads": mamba_heads, "mamba_n_groups": file.count("mamba_ngroups", 1), "mamba_d_head": "auto",
            "mamba_d_state": file.count("mamba_d_state", 64), "mamba_proj_bias": bias, "mamba_conv_bias": True,
        }  # fmt: skip
        shape, mamba = read_mamba(ConfigFile({**file.fields, **given}), kv_heads)
        kept = [keeps_state for has_block in hybrid for keeps_state in ((False, True) if has_block else (True,))]
        states = frozenset(number for number, keeps_state in enumerate(kept) if keeps_state)
        sizes = {
            "num_hidden_layers": len(kept), "head_dim": dim, "num_key_value_heads": kv_heads,
            "intermediate_size": file.count("intermediate_size", 4 * hidden),
        }  # fmt: skip
        return read_llama_config(
            Zamba2Config,
            ConfigFile({**file.fields, **sizes}),
            Defaults(4096, rms_norm_eps=1e-5, tie_word_embeddings=True),
            state_windows(states, len(kept)),
            scale=(dim / 2) ** -0.5,
            activation="gelu",
            mlp_bias=bias,
            rotates=file.flag("use_mem_rope"),
            state_layers=states,
            states=shape,
            mamba=mamba,
            hybrid=hybrid,
            blocks=file.count("num_mem_blocks", 1),
            rank=file.count("adapter_rank", 128),
            adapts_attention=adapts,
        )
