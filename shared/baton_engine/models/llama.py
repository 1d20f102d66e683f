"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024), and the layers that models derived from it share."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.attention import Attention
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import LayerNorm, RmsNorm
from baton_engine.layers.rope import Rope, read_rope, rotary_tables
from baton_engine.shard import Columns, Heads, Rows, head_part
from baton_engine.source import Source

from .decoder import ResidualDecoder
from .rotary_config import RotaryConfig

# The tables of each rope, as rotary_tables returns them.
RotaryTables = Mapping[Rope | None, tuple[torch.Tensor, torch.Tensor] | None]
# The values of hidden_act with their keys in baton_kernels.reference.activation.ACTIVATIONS.
HIDDEN_ACTS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
# Those of families whose code has one activation alone, or is not in transformers.
SILU = {"silu": "silu", "swish": "silu"}


class LlamaConfig(RotaryConfig, frozen=True, kw_only=True):
    """The config of Llama and of the models derived from it. rms_norm_eps, norm_offset: as in RmsNorm. activation: of
    the MLP, a key of baton_kernels.reference.activation.ACTIVATIONS."""

    rms_norm_eps: float
    norm_offset: float = 0.0
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def rotary_dim(self) -> int:
        """Elements of a head of which the rope rotates all or a part."""
        return self.head_dim

    def rope_of(self, layer: int) -> Rope | None:
        """Return how a layer rotates its queries and keys; None = not at all."""
        return self.rope

    def place_of(self, layer: int) -> int:
        """Return the number that a layer has in the checkpoint."""
        return layer


@dataclass(frozen=True)
class Defaults:
    """A family's defaults for fields that config.json lacks. num_kv_heads None = num_heads; head_dim None =
    hidden_size / num_heads."""

    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0


Kind = TypeVar("Kind", bound=LlamaConfig)


def read_llama_config(
    kind: type[Kind],
    file: ConfigFile,
    defaults: Defaults,
    windows: tuple[int | None, ...] | None = None,
    scale: float | None = None,
    rope: Rope | None = None,
    eps: float | None = None,
    sinks: bool = False,
    activation: str = "silu",
    activations: Mapping[str, str] = HIDDEN_ACTS,
    **facts: Any,
) -> Kind:
    """Return the config of a config.json with Llama's fields.

    windows: the sliding window of each layer; None = no layer has one. scale: of attention scores; None = head_dim **
    -0.5. rope, eps: None = read from Llama's fields. sinks: all layers have them. activation: the family's default of
    hidden_act. activations: the values that it may have, as in HIDDEN_ACTS. kind: the family's config class. facts: the
    fields that it adds to Llama's.
    """
    activation = activations[file.choice("hidden_act", activation, tuple(activations))]
    heads, hidden, layers = (file.count(name) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kv_heads = file.count("num_key_value_heads", defaults.num_kv_heads or heads)
    head_dim = file.count("head_dim", defaults.head_dim or hidden // heads)
    context = file.count("max_position_embeddings", defaults.max_position_embeddings)
    return kind(
        architecture=file.architecture,
        vocab_size=file.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=file.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=file.flag("tie_word_embeddings", defaults.tie_word_embeddings),
        dtype=file.dtype,
        eos_token_ids=file.eos_token_ids,
        attention=tuple(
            AttentionSpec(scale=scale or head_dim**-0.5, window=window, sinks=sinks)
            for window in windows or (None,) * layers
        ),
        rms_norm_eps=file.number("rms_norm_eps", defaults.rms_norm_eps) if eps is None else eps,
        rope=rope or read_rope(file, context, theta=defaults.rope_theta),
        activation=activation,
        **facts,
    )


def llama_fields(file: ConfigFile, activation: str | None = None, **names: tuple[str, int]) -> ConfigFile:
    """Rename the size fields of a config.json to Llama's names, for a family without grouped KV heads.

    names: for each of Llama's names, the family's own name and default. activation: the family's name for hidden_act.
    """
    fields: dict[str, Any] = {
        ours: file.count(own, file.count(ours, default)) for ours, (own, default) in names.items()
    }
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if hidden % heads:
        raise ConfigError(f"{names['hidden_size'][0]} {hidden} is not a multiple of the {heads} attention heads")
    fields |= {"num_key_value_heads": heads, "head_dim": hidden // heads}
    if activation is not None:
        fields["hidden_act"] = file.fields.get(activation)
    return ConfigFile({**file.fields, **fields})


def fused_qkv(config: LlamaConfig, source: Source, name: str, order: Sequence[int] | None = None) -> Linear:
    """Return a projection to queries, keys and values that a checkpoint holds as one matrix.

    order: the checkpoint's outputs in the order queries, keys, values; None = the checkpoint has this order.
    """
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    parts = [heads * dim, kv_heads * dim, kv_heads * dim]
    permuted = config.rope.order(heads, kv_heads, dim)
    if order is not None and permuted is not None:
        permuted = [order[output] for output in permuted]
    return Linear(
        source, [name], [sum(parts)], config.hidden_size, bias=config.qkv_bias, order=permuted or order, parts=parts,
        shard=Heads(source.ranks, dim),
    )  # fmt: skip


def head_norms(config: LlamaConfig, source: Source, names: tuple[str, str]) -> tuple[RmsNorm, RmsNorm]:
    """Return the norms of each query head and of each key head. names: of the two norms."""
    dim, eps, offset = config.head_dim, config.rms_norm_eps, config.norm_offset
    q_norm, k_norm = (RmsNorm(source.at(name), dim, eps, offset) for name in names)
    # The dimensions of one head, in the order that its queries and keys have.
    order = config.rope.order(1, 0, config.head_dim)
    if order is not None:
        q_norm.weight, k_norm.weight = q_norm.weight[order], k_norm.weight[order]
    return q_norm, k_norm


class LlamaLayer:
    """Attention and an MLP, each after a norm that also adds the previous output to the residual.

    blocks: the names of attention and of the MLP; None = their tensors are beside the norms. norms: the names of those
    before them. output, head_norms: those of attention's last projection and of the norms of its query and key heads.
    sinks: that of attention's sinks. gates, down: those of the MLP's first two projections and of its last.
    """

    blocks: tuple[str | None, str | None] = ("self_attn", "mlp")
    norms = ("input_layernorm", "post_attention_layernorm")
    output = "o_proj"
    head_norms = ("q_norm", "k_norm")
    sinks = "sinks"
    gates = ("gate_proj", "up_proj")
    down = "down_proj"

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        hidden, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.attention = self.make_attention(config, self.block(source, 0), layer, rotary)
        self.input_norm = RmsNorm(source.at(self.norms[0]), hidden, eps, offset).before(self.attention)
        self.mlp = self.make_mlp(config, source, layer)
        self.post_attention_norm = RmsNorm(source.at(self.norms[1]), hidden, eps, offset).before(self.mlp)

    def of_layer(self, layer: int) -> Self:
        """Return a layer with the same weights that has the keys and values of another number."""
        assert isinstance(self.attention, Attention)
        again = copy(self)
        again.attention = self.attention.of_layer(layer)
        return again

    def block(self, source: Source, index: int) -> Source:
        """Return the source of a block's tensors. source: of the layer. index: of the block in `blocks`."""
        name = self.blocks[index]
        return source if name is None else source.at(name)

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        """Return the attention: [T, hidden] in the form of its `inputs` to [T, hidden]."""
        norms = self.qk_norms(config, source) if config.qk_norm else None
        sinks = None
        if config.attention[layer].sinks:
            own = head_part(config.num_heads, source.ranks)
            sinks = source.take(self.sinks, (config.num_heads,), (own,), torch.float32)
        # baton_quantize relies on the output projection being read first.
        output = self.attended(config, source)
        return Attention(config, layer, source, self.qkv(config, source), output, rotary, norms, sinks)

    def attended(self, config: LlamaConfig, source: Source) -> Linear:
        """Return the projection of the heads' results to [T, hidden]."""
        inputs, shard = config.num_heads * config.value_dim, Rows(source.ranks)
        return Linear(source, [self.output], [config.hidden_size], inputs, bias=config.output_bias, shard=shard)

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        """Return the MLP: [T, hidden] in the form of its `inputs` to [T, hidden]."""
        source = self.block(source, 1)
        down = self.down_projection(config, source)
        return GatedMlp(self.gate_up(config, source), down, config.activation)

    def down_projection(self, config: LlamaConfig, source: Source) -> Linear:
        inner, shard = config.intermediate_size, Rows(source.ranks)
        return Linear(source, [self.down], [config.hidden_size], inner, bias=config.mlp_bias, shard=shard)

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        """Return the projection of [T, hidden] to queries, keys and values side by side."""
        heads, kv_heads, dim, value_dim = config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim
        names, sizes = ["q_proj", "k_proj", "v_proj"], [heads * dim, kv_heads * dim, kv_heads * value_dim]
        order = config.rope.order(heads, kv_heads, dim, value_dim)
        shard = Heads(source.ranks, dim, last_dim=value_dim)
        return Linear(source, names, sizes, config.hidden_size, bias=config.qkv_bias, order=order, shard=shard)

    def qk_norms(self, config: LlamaConfig, source: Source) -> tuple[RmsNorm, RmsNorm]:
        """Return the norms of each query head and of each key head."""
        return head_norms(config, source, self.head_norms)

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        inner, shard = config.intermediate_size, Columns(source.ranks)
        return Linear(source, [*self.gates], [inner, inner], config.hidden_size, bias=config.mlp_bias, shard=shard)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_norm.add(x, residual)
        x = self.attention(normed, ctx)
        normed, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(normed), residual


class Layer(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output, which the next norm adds to the residual, and the residual, [T, hidden] each.

        x: the previous layer's output, not added to the residual yet. residual: None = zeros, before the first layer.
        """


class Llama(ResidualDecoder):
    """A decoder of Llama layers.

    embedding_name, layers_name, final_norm: the names of the embedding, of the layers and of the norm after the last.
    """

    layer: Callable[..., Layer] = LlamaLayer
    embedding_name = "embed_tokens"
    layers_name = "layers"
    final_norm = "norm"

    def __init__(self, config: LlamaConfig, source: Source, max_positions: int) -> None:
        super().__init__(source)
        inside, source = self.parts(source)
        self.embedding = self.make_embedding(config, inside.at(self.embedding_name))
        rotary: dict[Rope | None, tuple[torch.Tensor, torch.Tensor] | None] = {None: None}
        for rope in filter(None, map(config.rope_of, source.stage.layers(config.num_layers))):
            if rope not in rotary:
                rotary[rope] = rotary_tables(rope, config.rotary_dim, max_positions, source.device)
        self.layers = self.make_layers(config, inside, rotary)
        self.norm = self.make_norm(config, inside)
        self.head = self.make_head(config, source)

    def make_embedding(self, config: LlamaConfig, source: Source) -> Embedding:
        return Embedding(source, config.vocab_size, config.hidden_size)

    def make_layers(self, config: LlamaConfig, source: Source, rotary: RotaryTables) -> list[Layer]:
        """Return the layers of this stage."""
        name = self.layers_name
        return [
            self.layer(config, source.at(f"{name}.{config.place_of(layer)}"), layer, rotary[config.rope_of(layer)])
            for layer in source.stage.layers(config.num_layers)
        ]

    def make_norm(self, config: LlamaConfig, source: Source) -> RmsNorm | LayerNorm:
        """Return the norm after the last layer."""
        return RmsNorm(source.at(self.final_norm), config.hidden_size, config.rms_norm_eps, config.norm_offset)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias, mlp_bias = file.flag("attention_bias"), file.flag("mlp_bias")
        return read_llama_config(LlamaConfig, file, Defaults(2048), qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
