"""The text part of GLM-5.3-Flash (GLM Team, 2026): most layers have Kimi Linear's delta rule with bounded decays, the
others latent attention over groups of tokens that an indexer selects. Several residual streams are mixed.

The layer for multi-token prediction is not read.
"""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import ExpertsMethod, JoinedForm
from baton_engine.layers.embedding import Embedding
from baton_engine.layers.experts import load_joined_experts
from baton_engine.layers.hyper_connections import MixedConnection, StreamMean
from baton_engine.layers.indexer import Indexer, Selector
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import LimitedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.pooled_indexer import PooledIndexer
from baton_engine.layers.rope import rotary_tables
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import LimitedGate
from baton_kernels.reference.recurrence import StateShape

from .deepseek_v2 import DeepseekConfig
from .deepseek_v32 import has_indexer
from .glm5_next_config import Glm5NextConfig, read_glm5_next_config
from .kimi_linear import LowRankInputs
from .latent_states import LatentStatesLayer
from .llama import LlamaConfig
from .sparse_config import SparseConfig
from .streams import StreamDecoder, pass_streams

# What names of the decay's tensors begin with in transformers. Checkpoints have these beside the other projections.
_DECAY = "forget_gate."


class Glm5NextLayer(LatentStatesLayer):
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        assert isinstance(config, Glm5NextConfig)
        super().__init__(config, source, layer, rotary)
        self.around_attention, self.around_mlp = (
            MixedConnection(source, _stream_names(source, block), config.hidden_size, config.mixing, config.rounds)
            for block in ("attn", "ffn")
        )

    def decay_names(self, source: Source) -> str:
        return _DECAY if f"{_DECAY}A_log" in source else ""

    def delta_inputs(self, shape: StateShape, source: Source, hidden: int) -> LowRankInputs:
        return LowRankInputs(shape, source, hidden, self.decay_names(source))

    def make_indexer(
        self, config: DeepseekConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> Selector | None:
        assert isinstance(config, Glm5NextConfig)
        if not has_indexer(config, source, layer):
            return None
        assert config.low_rank is not None
        inside, hidden, low_rank = source.at("indexer"), config.hidden_size, config.low_rank
        if config.latent.group > 1:
            return PooledIndexer(inside, layer, config.latent, hidden, low_rank)
        # The key of a group with one token is that of the token, whatever its gates are.
        return Indexer(
            inside, layer, config.latent, hidden=hidden, low_rank=low_rank, rotary=rotary, interleaved=False
        )  # fmt: skip

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, Glm5NextConfig)
        if layer not in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source = self.block(source, 1)
        return LimitedMlp(self.gate_up(config, source), self.down_projection(config, source), _gate(config))

    def shared_expert(self, config: SparseConfig, source: Source) -> LimitedMlp:
        size, hidden, ranks = config.shared_size, config.hidden_size, source.ranks
        gate_up = Linear(source, [*self.gates], [size, size], hidden, shard=Columns(ranks))
        down = Linear(source, [self.down], [hidden], size, shard=Rows(ranks, joins=False))
        return LimitedMlp(gate_up, down, _gate(config))

    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        form = JoinedForm(activation=_gate(config))
        return load_joined_experts(source, config.num_experts, config.hidden_size, config.expert_size, form)

    def __call__(self, streams: torch.Tensor, ctx: Context) -> torch.Tensor:  # type: ignore[override]
        """streams: as in MixedConnection. Returns them after this layer."""
        return pass_streams(self, streams, ctx)


class Glm5Next(StreamDecoder):
    def __init__(self, config: Glm5NextConfig, source: Source, max_positions: int) -> None:
        super().__init__(source)
        inside, source = self.parts(source)
        hidden, self.streams = config.hidden_size, config.mixing.streams
        self.embedding = Embedding(inside.at("embed_tokens"), config.vocab_size, hidden)
        # They have no elements, because nothing is rotated.
        rotary = rotary_tables(config.rope, config.rotary_dim, max_positions, source.device)
        self.layers = [
            Glm5NextLayer(config, inside.at(f"layers.{layer}"), layer, rotary)
            for layer in source.stage.layers(config.num_layers)
        ]
        self.stream_head = StreamMean(self.streams)
        self.norm = RmsNorm(inside.at("norm"), hidden, config.rms_norm_eps)
        self.head = self.make_head(config, source)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_glm5_next_config(file)


def _gate(config: LlamaConfig) -> LimitedGate:
    """Return the function of gates and ups in all MLPs."""
    assert isinstance(config, Glm5NextConfig)
    return LimitedGate(config.limit, before=True)


def _stream_names(source: Source, block: str) -> str:
    """Return the beginning of the names of a connection's tensors: that of checkpoints, or of
    transformers in memory."""
    stored = f"hc_{block}_"
    return stored if f"{stored}fn" in source else f"{block}_hc."
