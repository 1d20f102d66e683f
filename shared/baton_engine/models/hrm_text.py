"""HRM-Text (Wang et al., "Hierarchical Reasoning Model", 2025): two stacks of layers, each computed several times for a
token, with gates of what attention returns.

Each time that a layer is computed, it has keys and values of its own, so it counts as a layer of its own, with the
weights of the others. Prompts are causal, as in transformers' generate. The model can also read the instructions of a
prompt in both directions (prefix_lm), for which transformers needs token_type_ids from the caller.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.gated_attention import GatedAttention
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import UnitNorm
from baton_engine.shard import Heads
from baton_engine.source import Source

from .llama import Defaults, Layer, Llama, LlamaConfig, LlamaLayer, RotaryTables, read_llama_config
from .phi3 import fused_gate_up

# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 151808, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 12, "head_dim": 128,
}  # fmt: skip


class HrmTextConfig(LlamaConfig, frozen=True, kw_only=True):
    """slow_cycles, fast_cycles: how often the slow stack is computed, and the fast one before each time.
    embedding_scale: a factor of embeddings."""

    slow_cycles: int
    fast_cycles: int
    embedding_scale: float

    @property
    def stack_layers(self) -> int:
        return self.num_layers // (self.slow_cycles * (self.fast_cycles + 1))


class HrmTextLayer(LlamaLayer):
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        self.attention = self.make_attention(config, self.block(source, 0), layer, rotary)
        self.mlp = self.make_mlp(config, source, layer)
        norm = UnitNorm(source, config.hidden_size, config.rms_norm_eps)
        self.input_norm, self.post_attention_norm = norm.before(self.attention), norm.before(self.mlp)

    def block(self, source: Source, index: int) -> Source:
        return source.at("attn") if index == 0 and _is_fused(source.at("attn")) else super().block(source, index)

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        output, size = self.attended(config, source), config.num_heads * config.head_dim
        hidden, shard = config.hidden_size, Heads(source.ranks, config.head_dim)
        if _is_fused(source):
            names, sizes, qkv_order = ["gqkv_proj"], [4 * size], range(size, 4 * size)
            gate = Linear(source, names, sizes, hidden, order=range(size), parts=[size], shard=shard)
            qkv = Linear(source, names, sizes, hidden, order=qkv_order, parts=[size] * 3, shard=shard)
        else:
            gate = Linear(source, ["gate_proj"], [size], hidden, shard=shard)
            qkv = Linear(source, ["q_proj", "k_proj", "v_proj"], [size] * 3, hidden, shard=shard)
        return GatedAttention(config, layer, source, qkv, gate, output, torch.sigmoid, rotary)

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        if "gate_up_proj.weight" not in source:
            return super().gate_up(config, source)
        return fused_gate_up(config, source)


def _is_fused(attention: Source) -> bool:
    """Whether a checkpoint has the projections of attention as one matrix, as the first ones do."""
    return "gqkv_proj.weight" in attention


class HrmText(Llama):
    layer: Callable[..., Layer] = HrmTextLayer

    def __init__(self, config: HrmTextConfig, source: Source, max_positions: int) -> None:
        if source.stage.count > 1:
            raise ConfigError(
                "--pipeline-parallel divides the layers of a model, but those of this one need the results of two "
                "earlier ones: use --tensor-parallel"
            )
        super().__init__(config, source, max_positions)
        self.scale, self.stack_layers = config.embedding_scale, config.stack_layers
        self.slow_cycles, self.fast_cycles = config.slow_cycles, config.fast_cycles
        self.start = self.parts(source)[0].take("z_L_init", (config.hidden_size,))

    def make_layers(self, config: LlamaConfig, source: Source, rotary: RotaryTables) -> list[Layer]:
        """Return the layers in the order in which they are computed."""
        assert isinstance(config, HrmTextConfig)
        tables, count = rotary[config.rope], config.stack_layers
        fast, slow = (
            [HrmTextLayer(config, source.at(f"{name}.layers.{layer}"), layer, tables) for layer in range(count)]
            for name in ("L_module", "H_module")
        )
        stacks = [*[fast] * config.fast_cycles, slow] * config.slow_cycles
        return [layer.of_layer(number) for number, layer in enumerate(layer for stack in stacks for layer in stack)]

    def make_norm(self, config: LlamaConfig, source: Source) -> UnitNorm:
        """Return the norm after each stack, which the last one needs too."""
        return UnitNorm(source, config.hidden_size, config.rms_norm_eps)

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).mul_(self.scale)

    def __call__(self, ctx: Context) -> torch.Tensor:
        slow = self.begin(ctx)
        fast = self.start.expand_as(slow)
        layers = iter(self.layers)
        for _ in range(self.slow_cycles):
            for _ in range(self.fast_cycles):
                fast = self.stack(layers, fast + slow, ctx)
            slow = self.stack(layers, slow + fast, ctx)
        return slow

    def stack(self, layers: Iterator[Layer], x: Any, ctx: Context) -> torch.Tensor:
        """Return the result of the next stack. x: its input, which it may overwrite."""
        residual: Any = None
        for layer in islice(layers, self.stack_layers):
            x, residual = layer(x, residual, ctx)
        return self.norm.add(x, residual)[0]

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        for name in ("attention_bias", "mlp_bias"):
            file.require_absent(name, False)
        slow, fast, heads = file.count("H_cycles", 2), file.count("L_cycles", 3), file.count("num_attention_heads")
        # transformers writes the number of layers that are computed, and that of a stack beside it.
        each = file.count("num_layers_per_stack", file.count("num_hidden_layers"))
        layers = each * slow * (fast + 1)
        if "num_layers_per_stack" in file.fields:
            file.require_absent("num_hidden_layers", layers)
        return read_llama_config(
            HrmTextConfig,
            ConfigFile({**file.fields, "num_hidden_layers": layers, "num_key_value_heads": heads}),
            Defaults(2048),
            slow_cycles=slow,
            fast_cycles=fast,
            embedding_scale=file.number("embedding_scale", 1 / file.number("initializer_range", 0.02)),
        )
