"""The forward pass of all families: an embedding, layers one after another, a norm and a head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.layers.embedding import Embedding, Head, head
from baton_engine.layers.norm import LayerNorm, RmsNorm
from baton_engine.source import Source


class Decoder:
    """A model whose layers return hidden states [T, hidden]: x = layer(x, ctx).

    A stage of a pipeline has some of the layers. The hidden states that it receives take the place of the embedding,
    and it passes on hidden states before the norm. head_name: that of the head in a checkpoint.
    """

    embedding: Embedding
    layers: Sequence[Callable[..., Any]]
    norm: Any
    head: Head
    head_name = "lm_head"

    def __init__(self, source: Source) -> None:
        self.dtype, self.stage = source.dtype, source.stage

    def parts(self, source: Source) -> tuple[Source, Source]:
        """Return the source of the embedding, the layers and the norm, and that of the head."""
        return source.at("model"), source

    def make_head(self, config: Any, source: Source) -> Head:
        """config: of the family."""
        return head(source, self.embedding, config.tie_word_embeddings, self.head_name)

    def embed(self, ctx: Context) -> torch.Tensor:
        """Return the hidden states [T, hidden] before the model's first layer."""
        return self.embedding(ctx.ids)

    def begin(self, ctx: Context) -> torch.Tensor:
        """Return the hidden states [T, hidden] before the first layer here, in memory of their own.

        Layers change them, and received ones are still needed where only a part of them is received for the next step.
        Both the embedding and the copy launch kernels of torch. These start when all earlier kernels have ended, so
        that the kernels of layers may read what is the same in all layers at any time (overlap.py).
        """
        return self.embed(ctx) if ctx.received is None else ctx.received.clone()

    def __call__(self, ctx: Context) -> torch.Tensor:
        x = self.begin(ctx)
        for layer in self.layers:
            x = layer(x, ctx)
        return self.norm(x) if self.stage.is_last else x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(hidden, out)


class ResidualDecoder(Decoder):
    """A model whose layers leave their last addition to the next norm: x, residual = layer(x, residual, ctx)."""

    norm: RmsNorm | LayerNorm

    def __call__(self, ctx: Context) -> torch.Tensor:
        x = self.begin(ctx)
        residual: Any = None
        for layer in self.layers:
            x, residual = layer(x, residual, ctx)
        # The norm rounds the sum, too, so stages compute the same numbers as one process.
        normed, total = self.norm.add(x, residual)
        return normed if self.stage.is_last else total
