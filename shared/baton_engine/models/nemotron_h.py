"""Nemotron-H and Nemotron Nano 2 (NVIDIA, 2025): Mamba 2, attention without rotation, and MLPs without gates, one in
each layer of the checkpoint.

Only Mamba and attention need the cache. So one layer of the engine is one of these, and the MLPs up to the next one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import WideRmsNorm
from baton_engine.layers.recurrence import Mamba
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .block_layer import BlockLayer, by_cache
from .layer_norm_llama import plain_mlp
from .llama import Defaults, Layer, Llama, LlamaConfig, RotaryTables, read_llama_config
from .recurrent_states import WithStates, mamba, read_mamba, state_windows
from .rotary_config import MaybeRotates

# The kinds of blocks, with their letters in hybrid_override_pattern and their earlier names.
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe", "mamba": "linear_attention",
          "attention": "full_attention"}  # fmt: skip
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


class NemotronHConfig(WithStates, MaybeRotates, LlamaConfig, frozen=True, kw_only=True):
    """blocks: of each layer. One of them is Mamba or attention."""

    rotates: bool
    state_layers: frozenset[int]
    states: StateShape | None
    mamba: Mamba | None
    blocks: tuple[tuple[Block, ...], ...]

    @property
    def mlp_units(self) -> float:
        """As in ModelConfig, on average over layers."""
        mlps = sum(block.kind == "mlp" for layer in self.blocks for block in layer)
        return mlps * self.intermediate_size / self.num_layers


class NemotronHLayer(BlockLayer):
    blocks = (None, None)

    def __init__(self, config: NemotronHConfig, source: Source, layer: int) -> None:
        """source: of all layers."""
        self.parts = []
        for kind, place in config.blocks[layer]:
            inside = source.at(f"{place}")
            part = self.make_block(config, inside.at("mixer"), layer, kind)
            norm = WideRmsNorm(inside.at("norm"), config.hidden_size, config.rms_norm_eps).before(part)
            self.parts.append((norm, part, kind != "mlp"))

    def make_block(self, config: NemotronHConfig, source: Source, layer: int, kind: str) -> Callable[..., torch.Tensor]:
        if kind == "mlp":
            return plain_mlp(config, source, ("up_proj", "down_proj"))
        if kind == "linear_attention":
            return mamba(config, source, layer)
        return self.make_attention(config, source, layer, None)


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
        layers = by_cache(_read_blocks(file), lambda block: block.kind != "mlp")
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
        return read_llama_config(
            NemotronHConfig,
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
        )


def _read_blocks(file: ConfigFile) -> list[Block]:
    """Return the blocks of all layers of the checkpoint, in their order."""
    given = file.fields.get("layers_block_type") or file.fields.get("hybrid_override_pattern")
    kinds = [_KINDS.get(each, each) for each in given] if isinstance(given, str | list) else []
    if not kinds or not all(kind in _KINDS.values() for kind in kinds):
        raise ConfigError(
            f"hybrid_override_pattern or layers_block_type in config.json is {given!r}; it must name the block of each "
            "layer"
        )
    if "moe" in kinds:
        raise ConfigError(f"experts without gates, which {file.architecture} has in its layers, are not served")
    return [Block(kind, place) for place, kind in enumerate(kinds)]
