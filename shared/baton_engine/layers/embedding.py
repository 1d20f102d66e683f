"""The embedding of token ids, and the output layer that turns hidden states into logits."""

import torch
from torch.nn import functional

from baton_engine.quantization.dense import Dense
from baton_engine.source import Source

from .linear import Linear


class Embedding:
    """The vectors of token ids. scale: factor of the vectors, rounded to their dtype; None = off."""

    def __init__(self, source: Source, vocab_size: int, hidden_size: int, scale: float | None = None) -> None:
        self.weight = source.take("weight", (vocab_size, hidden_size))
        self._ops = source.ops
        self._scale = None if scale is None else torch.tensor(scale, dtype=source.dtype, device=source.device)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [T] int64. Returns [T, hidden]."""
        x = functional.embedding(ids, self.weight)
        return x if self._scale is None else x.mul_(self._scale)

    def as_head(self) -> Dense:
        """Return the output layer that has the same weights as this embedding."""
        return Dense(self.weight, None, self._ops)


def head(source: Source, embedding: Embedding, tied: bool, name: str = "lm_head") -> Linear | Dense:
    """Return the layer that turns hidden states [R, hidden] into logits [R, vocab].

    tied: the layer shares the weights of the embedding; otherwise it has those that the source has by this name.
    """
    if tied:
        return embedding.as_head()
    vocab_size, hidden_size = embedding.weight.shape
    return Linear(source, [name], [vocab_size], hidden_size, sensitive=True)
