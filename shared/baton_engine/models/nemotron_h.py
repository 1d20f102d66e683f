"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA, 2025): Mamba 2, attention without rotation, MLPs and experts, one
in each layer of the checkpoint. Neither MLPs nor experts have gates.

Only Mamba and attention need the cache. So one layer of the engine is one of these, and the MLPs and experts up to the
next one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertNames
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_experts
from baton_engine.layers.latent_experts import LatentExpertMlp
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import Mlp
from baton_engine.layers.norm import WideRmsNorm
from baton_engine.layers.recurrence import Mamba
from baton_engine.shard import Columns, Partial, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS, NoGate
from baton_kernels.reference.recurrence import StateShape

from .block_layer import BlockLayer, by_cache
from .layer_norm_llama import plain_mlp
from .llama import Defaults, Layer, Llama, LlamaConfig, RotaryTables, read_llama_config
from .recurrent_states import WithStates, mamba, read_mamba, state_windows
from .rotary_config import MaybeRotates
from .sparse_config import SparseConfig, read_grouped_routing

# The kinds of blocks, with their letters in hybrid_override_pattern and their earlier names.
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe", "mamba": "linear_attention",
          "attention": "full_attention"}  # fmt: skip
# Those that need the cache.
_CACHED = ("linear_attention", "full_attention")
_PROJECTIONS = ("up_proj", "down_proj")
_SIZES = {"vocab_size": 131_072, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 21_504,
          "head_dim": 128, "mlp_hidden_act": "relu2"}  # fmt: skip
# The names of fields of Mamba, and those that other families have for them.
_MAMBA = {
    "mamba_n_heads": ("mamba_num_heads", 128), "mamba_d_head": ("mamba_head_dim", 64),
    "mamba_n_groups": ("n_groups", 8), "mamba_d_state": ("ssm_state_size", 128), "mamba_d_conv": ("conv_kernel", 4),
}  # fmt: skip


class Block(NamedTuple):
    """place: the number of its layer in the checkpoint."""

    kind: str
    place: int


class WithBlocks(WithStates, MaybeRotates):
    """A part of the config. blocks: of each layer. One of them is Mamba or attention."""

    blocks: tuple[tuple[Block, ...], ...]

    def per_layer(self, kind: str) -> float:
        """Return how many blocks of a kind a layer has on average."""
        return sum(block.kind == kind for layer in self.blocks for block in layer) / len(self.blocks)


class NemotronHConfig(WithBlocks, LlamaConfig, frozen=True, kw_only=True):
    rotates: bool
    state_layers: frozenset[int]
    states: StateShape | None
    mamba: Mamba | None
    blocks: tuple[tuple[Block, ...], ...]

    @property
    def mlp_units(self) -> float:
        """As in ModelConfig, on average over layers."""
        return self.per_layer("mlp") * self.intermediate_size


class NemotronHMoeConfig(WithBlocks, SparseConfig, frozen=True, kw_only=True):
    """latent: elements of the inputs and results of experts; 0 = those of a hidden state, without projections."""

    rotates: bool
    state_layers: frozenset[int]
    states: StateShape | None
    mamba: Mamba | None
    blocks: tuple[tuple[Block, ...], ...]
    latent: int

    def _weights(self, experts: float) -> float:
        # Every hidden unit has two rows of weights, as there are no gates.
        hidden, latent, sparse = self.hidden_size, self.latent, self.per_layer("moe")
        routed = 2 * (latent or hidden) * experts * self.expert_size
        around = hidden * (self.num_experts + 2 * latent + 2 * self.shared_size)
        mlps = 2 * hidden * self.per_layer("mlp") * self.intermediate_size
        return self.attention_weights + sparse * (routed + around) + mlps

    def _units(self, experts: float) -> float:
        chosen = experts * self.expert_size + self.shared_size
        return self.per_layer("mlp") * self.intermediate_size + self.per_layer("moe") * chosen


class NemotronHLayer(BlockLayer):
    blocks = (None, None)

    def __init__(self, config: Any, source: Source, layer: int) -> None:
        """source: of all layers."""
        self.parts = []
        for kind, place in config.blocks[layer]:
            inside = source.at(f"{place}")
            part = self.make_block(config, inside.at("mixer"), layer, kind)
            norm = WideRmsNorm(inside.at("norm"), config.hidden_size, config.rms_norm_eps).before(part)
            self.parts.append((norm, part, kind in _CACHED))

    def make_block(self, config: Any, source: Source, layer: int, kind: str) -> Callable[..., torch.Tensor]:
        if kind == "mlp":
            return plain_mlp(config, source, _PROJECTIONS)
        if kind == "moe":
            return _experts(config, source)
        if kind == "linear_attention":
            return mamba(config, source, layer)
        return self.make_attention(config, source, layer, None)


def _experts(config: NemotronHMoeConfig, source: Source) -> WithSharedExpert:
    """Return the experts of a layer, and the one that all tokens use."""
    count, hidden, ranks, bias = config.num_experts, config.hidden_size, source.ranks, config.mlp_bias
    correction = source.take("gate.e_score_correction_bias", (count,), dtype=torch.float32)
    router = Router(source.at("gate"), config.routing, count, hidden, correction=correction)
    latent = config.latent or hidden
    names = ExpertNames(None, *_PROJECTIONS, activation=NoGate(config.activation))
    held = load_experts(source.at("experts"), names, count, latent, config.expert_size)
    if config.latent:
        down = Linear(source, ["fc1_latent_proj"], [latent], hidden, bias=bias)
        up = Linear(source, ["fc2_latent_proj"], [hidden], latent, bias=bias, shard=Partial(ranks))
        routed: ExpertMlp = LatentExpertMlp(router, down, held, up, ranks)
    else:
        routed = ExpertMlp(router, held, ranks)
    source, size, (up_name, down_name) = source.at("shared_experts"), config.shared_size, _PROJECTIONS
    shared = Mlp(
        Linear(source, [up_name], [size], hidden, bias=bias, shard=Columns(ranks)),
        Linear(source, [down_name], [hidden], size, bias=bias, shard=Rows(ranks, joins=False)),
        ACTIVATIONS[config.activation],
    )
    return WithSharedExpert(routed, shared, ranks)


class NemotronH(Llama):
    embedding_name = "embeddings"
    final_norm = "norm_f"

    def parts(self, source: Source) -> tuple[Source, Source]:
        published = f"backbone.{self.embedding_name}.weight" in source
        return source.at("backbone" if published else "model"), source

    def make_layers(self, config: Any, source: Source, rotary: RotaryTables) -> list[Layer]:
        layers = source.stage.layers(config.num_layers)
        return [NemotronHLayer(config, source.at(self.layers_name), layer) for layer in layers]

    def make_norm(self, config: LlamaConfig, source: Source) -> WideRmsNorm:
        return WideRmsNorm(source.at(self.final_norm), config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_SIZES)
        layers = by_cache(_read_blocks(file), lambda block: block.kind in _CACHED)
        if not layers:
            raise ConfigError("config.json has no layer with Mamba or attention")
        states = frozenset(
            number for number, blocks in enumerate(layers) if any(kind == "linear_attention" for kind, _ in blocks)
        )
        fields = {ours: file.count(ours, file.count(own, default)) for ours, (own, default) in _MAMBA.items()}
        fields["mamba_conv_bias"] = file.flag("mamba_conv_bias", file.flag("use_conv_bias", True))
        fields["mamba_proj_bias"] = file.flag("use_bias")
        fields |= {"num_hidden_layers": len(layers), "hidden_act": file.fields["mlp_hidden_act"]}
        file = ConfigFile({**file.fields, **fields})
        shape, of_mamba = None, None
        if states:
            inner = fields["mamba_n_heads"] * fields["mamba_d_head"]
            shape, of_mamba = read_mamba(file, file.count("num_key_value_heads", 8), inner)
        sparse = any(block.kind == "moe" for blocks in layers for block in blocks)
        return read_llama_config(
            NemotronHMoeConfig if sparse else NemotronHConfig,
            file,
            Defaults(4096, num_kv_heads=8),
            state_windows(states, len(layers)),
            eps=file.number("layer_norm_epsilon", 1e-5),
            mlp_bias=file.flag("mlp_bias"),
            rotates=False,
            state_layers=states,
            states=shape,
            mamba=of_mamba,
            blocks=layers,
            **(_read_experts(file) if sparse else {}),
        )


def _read_experts(file: ConfigFile) -> dict[str, Any]:
    """Return the fields that NemotronHMoeConfig has for experts."""
    experts = file.count("n_routed_experts", 8)
    normalize = file.flag("norm_topk_prob", True)
    return {
        "num_experts": experts,
        "expert_size": file.count("moe_intermediate_size", 7688),
        "routing": read_grouped_routing(file, experts, 2, sigmoid=True, normalize=normalize, group_best=2),
        "shared_size": file.count("moe_shared_expert_intermediate_size", 7688),
        "latent": file.integer("moe_latent_size", 0),
    }


def _read_blocks(file: ConfigFile) -> list[Block]:
    """Return the blocks of all layers of the checkpoint, in their order."""
    given = file.fields.get("layers_block_type") or file.fields.get("hybrid_override_pattern")
    kinds = [_KINDS.get(each, each) for each in given] if isinstance(given, str | list) else []
    if not kinds or not all(kind in _KINDS.values() for kind in kinds):
        raise ConfigError(
            f"hybrid_override_pattern or layers_block_type in config.json is {given!r}; it must name the block of each "
            "layer"
        )
    return [Block(kind, place) for place, kind in enumerate(kinds)]
