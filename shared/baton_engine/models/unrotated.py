"""Models of LayerNorms and MLPs without gates whose queries and keys are not rotated."""

import torch

from baton_engine.context import Context
from baton_engine.layers.embedding import LearnedPositions
from baton_engine.layers.rope import Rope
from baton_engine.source import Source

from .layer_norm_llama import LayerNormConfig, LayerNormLlama
from .llama import LlamaConfig

NO_ROPE = Rope("none", 0.0)


class UnrotatedConfig(LayerNormConfig, frozen=True, kw_only=True):
    rope: Rope = NO_ROPE

    def rope_of(self, layer: int) -> Rope | None:
        return None


class ScaledConfig(UnrotatedConfig, frozen=True, kw_only=True):
    scaled: bool  # embeddings are multiplied by the square root of their size


class WithLearnedPositions(LayerNormLlama):
    """positions_name: of the vectors of positions. offset: as in LearnedPositions."""

    positions_name = "wpe"
    offset = 0

    def __init__(self, config: LlamaConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        inside, count = self.parts(source)[0].at(self.positions_name), config.max_position_embeddings
        self.positions = LearnedPositions(inside, count, config.hidden_size, self.offset)

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).add_(self.positions(ctx.positions))
