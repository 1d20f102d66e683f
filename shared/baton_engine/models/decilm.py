"""Llama-Nemotron Super and Ultra (Bercovich et al., "Llama-Nemotron", 2025) and Nemotron-51B: Llama 3 after a search
that left out attention or the MLP of some layers, put a matrix in their place, or made them smaller. And DeciLM-7B
(Deci, 2023), whose layers have different numbers of key-value heads.

Only attention needs keys and values. So one layer of the engine is the attention of a layer of the checkpoint, and all
that follows it up to the next attention.
"""

from collections.abc import Callable
from typing import Any, Literal, Self

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import RmsNorm
from baton_engine.shard import Place, head_part
from baton_engine.source import Source

from .block_layer import BlockLayer, by_cache
from .heads_by_layer import WithHeadsByLayer
from .llama import SILU, Defaults, Layer, Llama, LlamaConfig, RotaryTables, read_llama_config

# The fields of an attention and of an MLP, with the values that change nothing.
_ATTENTION: dict[str, tuple[Any, ...]] = {
    "window_length": (), "num_sink_tokens": (), "use_prefill_window_in_sink_attention": (False,),
    "unshifted_sink": (False,), "sparsify": (), "mamba": (), "llama4": (),
}  # fmt: skip
_MLP: dict[str, tuple[Any, ...]] = {"sparsify": (), "moe": (), "gated": (True,), "hidden_act": ("silu",)}
_UNITS = 256  # hidden units come in multiples of this many where ffn_mult says how many there are


class Block(msgspec.Struct, frozen=True):
    """A part of a layer that has a norm before it and adds to the residual.

    kind: linear_attn and linear_mlp are matrices in the place of attention and of the MLP. place: the number of its
    layer in the checkpoint. size: the key-value heads of attention, or the hidden units of an MLP.
    """

    kind: Literal["attention", "linear_attn", "mlp", "linear_mlp"]
    place: int
    size: int = 0


class DeciLmConfig(WithHeadsByLayer, LlamaConfig, frozen=True, kw_only=True):
    """blocks: of each layer. One of them is attention."""

    blocks: tuple[tuple[Block, ...], ...]

    def of_layer(self, layer: int) -> Self:
        """Return the config with the key-value heads of a layer as those of all."""
        [kv_heads] = self.sizes("attention", layer)
        return msgspec.structs.replace(self, num_kv_heads=kv_heads)

    def sizes(self, kind: str, *layers: int) -> list[int]:
        """Return the sizes of all blocks of a kind in these layers, by default in all."""
        chosen = [self.blocks[layer] for layer in layers] if layers else self.blocks
        return [block.size for blocks in chosen for block in blocks if block.kind == kind]

    @property
    def attention_weights(self) -> int:
        """As in ModelConfig, on average over layers."""
        each = (self.of_layer(layer).projections for layer in range(self.num_layers))
        return sum(outputs * inputs for layer in each for outputs, inputs in layer) // self.num_layers

    @property
    def mlp_units(self) -> float:
        """As in ModelConfig, on average over layers."""
        return sum(self.sizes("mlp")) / self.num_layers

    @property
    def layer_weights(self) -> int:
        """As in ModelConfig, on average over layers."""
        matrices = len(self.sizes("linear_attn") + self.sizes("linear_mlp")) / self.num_layers
        return self.attention_weights + round(self.hidden_size * (3 * self.mlp_units + matrices * self.hidden_size))

    def part(self, ranks: Place) -> Self:
        kv_heads = self.sizes("attention")
        if ranks.count > min(kv_heads) != max(kv_heads):
            # A head of the cache would be on two ranks in some layers and on one rank in others.
            raise ConfigError(
                f"--tensor-parallel {ranks.count} is more than the {min(kv_heads)} key-value heads of a layer"
            )
        return super().part(ranks).with_kv_heads(lambda size: len(range(size)[head_part(size, ranks)]))

    def with_kv_heads(self, changed: Callable[[int], int]) -> Self:
        """Return the config with other numbers of key-value heads in all layers."""
        blocks = tuple(
            tuple(
                msgspec.structs.replace(block, size=changed(block.size)) if block.kind == "attention" else block
                for block in layer
            )
            for layer in self.blocks
        )
        return msgspec.structs.replace(self, blocks=blocks)

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "kv_heads_by_layer": self.sizes("attention")}


class DeciLmLayer(BlockLayer):
    def __init__(
        self, config: DeciLmConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        """source: of all layers."""
        self.parts = []
        for block in config.blocks[layer]:
            inside = source.at(f"{block.place}")
            norm = self.norms[block.kind in ("mlp", "linear_mlp")]
            part = self.make_block(config, inside, layer, block, rotary)
            before = RmsNorm(inside.at(norm), config.hidden_size, config.rms_norm_eps).before(part)
            self.parts.append((before, part, block.kind == "attention"))

    def make_block(
        self, config: DeciLmConfig, source: Source, layer: int, block: Block,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Callable[..., torch.Tensor]:  # fmt: skip
        """source: of the block's layer in the checkpoint."""
        hidden, attention, mlp = config.hidden_size, self.block(source, 0), self.block(source, 1)
        if block.kind == "attention":
            return self.make_attention(config.of_layer(layer), attention, layer, rotary)
        if block.kind == "mlp":
            return self.make_mlp(msgspec.structs.replace(config, intermediate_size=block.size), source, layer)
        return Linear(attention if block.kind == "linear_attn" else mlp, [block.kind], [hidden], hidden)


class DeciLm(Llama):
    def make_layers(self, config: Any, source: Source, rotary: RotaryTables) -> list[Layer]:
        layers = source.stage.layers(config.num_layers)
        return [DeciLmLayer(config, source.at(self.layers_name), layer, rotary[config.rope]) for layer in layers]

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # Other values stand for other rotations.
        file.require_absent("position_embedding_type", "rope")
        blocks = by_cache(_read_blocks(file), lambda block: block.kind == "attention")
        if not blocks:
            raise ConfigError("block_configs in config.json has no layer with attention")
        parts = [block for layer in blocks for block in layer]
        kv_heads = {block.size for block in parts if block.kind == "attention"}
        most = max(kv_heads)
        if any(most % count for count in kv_heads):
            raise ConfigError(f"layers with {sorted(kv_heads)} key-value heads are not served together")
        fields = {
            "num_hidden_layers": len(blocks),
            "num_key_value_heads": most,
            "intermediate_size": max((block.size for block in parts if block.kind == "mlp"), default=1),
        }
        bias, mlp_bias = file.flag("attention_bias"), file.flag("mlp_bias")
        return read_llama_config(
            DeciLmConfig,
            ConfigFile({**file.fields, **fields}),
            Defaults(2048),
            activations=SILU,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=mlp_bias,
            blocks=blocks,
        )


def _read_blocks(file: ConfigFile) -> list[Block]:
    """Return the blocks of all layers, in their order."""
    layers, heads = file.count("num_hidden_layers"), file.count("num_attention_heads")
    given = file.fields.get("block_configs")
    if given is None and "num_key_value_heads_per_layer" in file.fields:
        return _read_whole_layers(file, layers, heads)
    if not isinstance(given, list) or len(given) != layers or not all(isinstance(each, dict) for each in given):
        raise ConfigError(f"block_configs in config.json must be a list of objects, one for each of {layers} layers")
    blocks = []
    for place, each in enumerate(given):
        layer = ConfigFile({**each, "architectures": file.fields.get("architectures")})
        blocks += _read_attention(layer.part("attention"), place, heads)
        blocks += _read_mlp(layer.part("ffn"), place, file.count("hidden_size"))
    return blocks


def _read_whole_layers(file: ConfigFile, layers: int, heads: int) -> list[Block]:
    """Return the blocks of DeciLM-7B. heads: of queries."""
    kv_heads = file.integers("num_key_value_heads_per_layer")
    if len(kv_heads) != layers or not all(count and heads % count == 0 for count in kv_heads):
        raise ConfigError(
            f"num_key_value_heads_per_layer in config.json must have a divisor of {heads} for each of {layers} layers"
        )
    units = file.count("intermediate_size")
    parts = [(Block("attention", place, count), Block("mlp", place, units)) for place, count in enumerate(kv_heads)]
    return [block for layer in parts for block in layer]


def _read_attention(part: ConfigFile, place: int, heads: int) -> list[Block]:
    """Return the attention of a layer, unless it has none. heads: of queries."""
    if part.flag("no_op"):
        return []
    if part.flag("replace_with_linear"):
        return [Block("linear_attn", place)]
    for name, values in _ATTENTION.items():
        part.require_absent(name, *values)
    group = part.count("n_heads_in_group")
    if heads % group:
        raise ConfigError(f"n_heads_in_group {group} in config.json does not divide the {heads} attention heads")
    return [Block("attention", place, heads // group)]


def _read_mlp(part: ConfigFile, place: int, hidden: int) -> list[Block]:
    """Return the MLP of a layer, unless it has none."""
    if part.flag("no_op"):
        return []
    if part.flag("replace_with_linear"):
        return [Block("linear_mlp", place)]
    for name, values in _MLP.items():
        part.require_absent(name, *values)
    if part.fields.get("intermediate_size") is not None:
        return [Block("mlp", place, part.count("intermediate_size"))]
    units = int(2 * round(part.number("ffn_mult"), 6) * hidden / 3)
    if units < 1:
        raise ConfigError("ffn_mult in config.json must be above 0")
    return [Block("mlp", place, -(-units // _UNITS) * _UNITS)]
