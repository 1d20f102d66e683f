"""DeepSeek-V4 (DeepSeek-AI, 2026): attention over a window and over entries that sum up windows of tokens, experts from
tables in the first layers, and several residual streams that are mixed.

config.num_layers counts the layers of the cache (entry_layers.py).
"""

from collections.abc import Callable

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.compressed_attention import AttentionSizes, CompressedAttention
from baton_engine.layers.compressor import Compressor, EntryIndexer, Rotary
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_joined_experts
from baton_engine.layers.hyper_connections import MixedConnection, StreamHead
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import LimitedMlp
from baton_engine.layers.norm import WideRmsNorm
from baton_engine.layers.rope import Rope, rotary_tables
from baton_engine.layers.table_router import TableRouter
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import LimitedGate
from baton_kernels.reference.compression import Compression, window_rows

from .deepseek_v4_config import DeepseekV4Config, read_deepseek_v4_config
from .deepseek_v4_names import StoredNames
from .entry_layers import own_places
from .llama import LlamaConfig
from .streams import StreamDecoder, pass_streams


class DeepseekV4Layer:
    """number: of the layer in the checkpoint. ropes: the tables of each rope."""

    def __init__(
        self, config: DeepseekV4Config, source: Source, number: int, ropes: dict[Rope, Rotary], is_first_stage: bool
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = self.make_attention(config, source.at("self_attn"), number, ropes)
        self.input_norm, self.post_attention_norm = (
            WideRmsNorm(source.at(name), hidden, eps) for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.from_table = number in config.table_layers
        if self.from_table and not is_first_stage:
            # Later stages do not know the tokens that are drawn after theirs.
            raise ConfigError(
                f"--pipeline-parallel puts layer {number} of this model on a stage after the first one, but it chooses "
                "experts by token ids: use fewer stages, or --tensor-parallel"
            )
        self.mlp = self.make_mlp(config, source.at("mlp"))
        self.around_attention, self.around_mlp = (
            MixedConnection(source, name, hidden, config.mixing, config.rounds) for name in ("attn_hc.", "ffn_hc.")
        )

    def make_attention(
        self, config: DeepseekV4Config, source: Source, number: int, ropes: dict[Rope, Rotary]
    ) -> CompressedAttention:
        place, hidden, eps, dim = config.places[number], config.hidden_size, config.rms_norm_eps, config.head_dim
        spec = config.compressed(number)
        sizes = AttentionSizes(
            hidden, config.num_heads, dim, config.low_rank, config.output_groups, config.output_rank, eps
        )
        if spec.entries is None:
            return CompressedAttention(source, place.keys, sizes, ropes[config.rope], None, None)
        rotary, entries, inside = ropes[config.entry_rope], spec.entries, source.at("compressor")
        assert place.states is not None
        layers, overlaps, rate = (place.states, entries.layer), entries.selected > 0, entries.rate
        shape = Compression(dim, rate, overlaps, 0, entries.place, 0)
        compressor = Compressor(inside, layers, shape, hidden, eps, rotary)
        indexer = None
        if overlaps:
            own = Compression(
                entries.index_dim, rate, overlaps, shape.numbers, window_rows(rate) - 1, entries.index_column
            )
            inside = inside.at("indexer")
            keys = Compressor(inside, layers, own, hidden, eps, rotary)
            heads = config.index_heads
            indexer = EntryIndexer(inside, place.keys, spec, keys, heads, hidden, config.low_rank, rotary)
        return CompressedAttention(source, place.keys, sizes, rotary, compressor, indexer)

    def make_mlp(self, config: DeepseekV4Config, source: Source) -> Callable[..., torch.Tensor]:
        count, hidden, gate = config.num_experts, config.hidden_size, source.at("gate")
        router: Router | TableRouter
        if self.from_table:
            router = TableRouter(gate, config.routing, count, hidden, config.vocab_size)
        else:
            correction = gate.take("e_score_correction_bias", (count,), dtype=torch.float32)
            router = Router(gate, config.routing, count, hidden, correction=correction)
        limited, ranks = LimitedGate(config.limit, before=True), source.ranks
        form = JoinedForm(activation=limited)
        held = load_joined_experts(source.at("experts"), count, hidden, config.expert_size, form)
        inside, size = source.at("shared_experts"), config.shared_size
        gate_up = Linear(inside, ["gate_proj", "up_proj"], [size, size], hidden, shard=Columns(ranks))
        down = Linear(inside, ["down_proj"], [hidden], size, shard=Rows(ranks, joins=False))
        return WithSharedExpert(ExpertMlp(router, held, ranks), LimitedMlp(gate_up, down, limited), ranks)

    def __call__(self, streams: torch.Tensor, ctx: Context) -> torch.Tensor:
        """streams: as in MixedConnection. Returns them after this layer."""
        return pass_streams(self, streams, ctx, *((ctx.ids,) if self.from_table else ()))


class DeepseekV4(StreamDecoder):
    def __init__(self, config: DeepseekV4Config, source: Source, max_positions: int) -> None:
        super().__init__(source)
        source = source.reading(StoredNames(source))
        inside, source = self.parts(source)
        hidden, self.streams = config.hidden_size, config.mixing.streams
        self.embedding = Embedding(inside.at("embed_tokens"), config.vocab_size, hidden)
        ropes = {
            rope: _tables(rope, config.head_dim, max_positions, source.device)
            for rope in {config.rope, config.entry_rope}
        }
        self.layers = [
            DeepseekV4Layer(config, inside.at(f"layers.{layer}"), layer, ropes, self.stage.is_first)
            for layer in own_places(self.stage, config.places, config.starts, config.num_layers)
        ]
        self.stream_head = StreamHead(inside, "hc_head.hc_", hidden, config.mixing)
        self.norm = WideRmsNorm(inside.at("norm"), hidden, config.rms_norm_eps)
        self.head = self.make_head(config, source)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_deepseek_v4_config(file)


def _tables(rope: Rope, head_dim: int, max_positions: int, device: torch.device) -> Rotary:
    """Return cosines and sines for the elements of a head that are rotated alone."""
    whole = msgspec.structs.replace(rope, partial=1.0)
    return rotary_tables(whole, rope.rotary_dim(head_dim), max_positions, device)
