"""The embedding of token ids, and the output layer that turns hidden states into logits.

Each rank has the same number of tokens of the vocabulary, a multiple of 4. The last ranks may have fewer.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from baton_engine.quantization.dense import Dense
from baton_engine.shard import Ranks, Replicated
from baton_engine.source import Source

from .linear import Linear


class _Tokens(Replicated):
    """Each rank computes the logits of its tokens."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def outputs(self, sizes: Sequence[int]) -> list[slice]:
        return [_own_tokens(size, self._ranks) for size in sizes]


def _tokens_of_a_rank(vocab_size: int, ranks: Ranks) -> int:
    # Four consecutive tokens share a random number (baton_kernels/reference/philox.py), so they stay on one rank.
    return -(-vocab_size // (4 * ranks.count)) * 4


def _own_tokens(vocab_size: int, ranks: Ranks) -> slice:
    each = _tokens_of_a_rank(vocab_size, ranks)
    return slice(min(ranks.rank * each, vocab_size), min((ranks.rank + 1) * each, vocab_size))


class Embedding:
    """The vectors of token ids.

    scale: factor of the vectors, rounded to their dtype; None = off. unread: how many rows the checkpoint has after
    those of the vocabulary.
    """

    def __init__(
        self, source: Source, vocab_size: int, hidden_size: int, scale: float | None = None, unread: int = 0
    ) -> None:
        self.shape = vocab_size, hidden_size
        self._stored_shape = vocab_size + unread, hidden_size
        self._own = _own_tokens(vocab_size, source.ranks)
        self._source = source
        # No other stage embeds tokens.
        self.weight = (
            self._take()
            if source.stage.is_first
            else torch.empty(0, hidden_size, dtype=source.dtype, device=source.device)
        )
        self._ops, self._ranks = source.ops, source.ranks
        self._scale = None if scale is None else torch.tensor(scale, dtype=source.dtype, device=source.device)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [T] int64. Returns [T, hidden]."""
        x = functional.embedding(ids, self.weight) if self._ranks.count == 1 else self._sum(ids)
        return x if self._scale is None else x.mul_(self._scale)

    def as_head(self, bias: torch.Tensor | None) -> Dense:
        """Return the output layer that has the same weights as this embedding, and gives the logits of its tokens.
        bias: of these tokens; None = 0."""
        return Dense(self.weight if self._source.stage.is_first else self._take(), bias, self._ops)

    def _take(self) -> torch.Tensor:
        return self._source.take("weight", self._stored_shape, (self._own,))

    def _sum(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, of which one has the vector of a token and the others have zeros."""
        count = len(self.weight)
        places = ids - self._own.start
        elsewhere = (places < 0) | (places >= count)
        if not count:
            x = self.weight.new_zeros(len(ids), self.shape[1])
        else:
            x = functional.embedding(places.clamp(0, count - 1), self.weight).masked_fill_(elsewhere[:, None], 0)
        return self._ranks.sum(x)


class JoinedEmbedding(Embedding):
    """The vectors of the first tokens of two tensors, of which the second continues the first (Molmo 2)."""

    def _take(self) -> torch.Tensor:
        parts, first = [], 0
        for name in ("embedding", "new_embedding"):
            size = self._source.stored_shape(name)[0]
            rows = slice(*(min(max(row - first, 0), size) for row in (self._own.start, self._own.stop)))
            parts.append(self._source.take(name, (size, self.shape[1]), (rows,)))
            first += size
        return torch.cat(parts)


class LearnedPositions:
    """The vectors of the positions 0 to count - 1. offset: how many rows the checkpoint has before that of position
    0."""

    def __init__(self, source: Source, count: int, hidden_size: int, offset: int = 0) -> None:
        rows = slice(offset, offset + count) if source.stage.is_first else slice(0, 0)
        self._weight = source.take("weight", (offset + count, hidden_size), (rows,))

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """positions: [T] int64. Returns [T, hidden]."""
        return functional.embedding(positions, self._weight)


def sinusoids(count: int, size: int, first: int = 0) -> torch.Tensor:
    """Return [count, size] float32: sines and then cosines of the positions from `first` on.

    Periods grow from 2 pi to 20,000 pi (Vaswani et al., "Attention Is All You Need", 2017, as in tensor2tensor).
    """
    half = size // 2
    frequencies = torch.exp(torch.arange(half).float() * (-math.log(10000) / (half - 1)))
    angles = torch.arange(first, first + count).float()[:, None] * frequencies
    return functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, size % 2))


class Head:
    """The layer that turns hidden states into logits. product: gives the logits of this rank's tokens.

    first_token: the first one of them. dtype: of logits.
    """

    def __init__(self, product: Callable[..., torch.Tensor], vocab_size: int, ranks: Ranks, dtype: torch.dtype) -> None:
        """dtype: of the product."""
        self._product, self._vocab_size, self._ranks = product, vocab_size, ranks
        self.first_token = _own_tokens(vocab_size, ranks).start
        self.dtype = dtype
        self._finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def begin_with(self, begin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let a family change hidden states before the product."""
        product = self._product
        self._product = lambda hidden, out=None: product(begin(hidden), out)

    def finish_with(self, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let a family change each logit, in place and in float32: after a softcap many logits are so close that 16
        bits could not distinguish them."""
        self._finish, self.dtype = finish, torch.float32

    def exclude(self, excluded: torch.Tensor) -> None:
        """Give some tokens the least logit there is, so that none of them is drawn. excluded: [vocab] bool."""

        def finish(logits: torch.Tensor) -> torch.Tensor:
            first = 0 if logits.shape[1] == self._vocab_size else self.first_token
            own = excluded[first : first + logits.shape[1]]
            return logits.masked_fill_(own, torch.finfo(logits.dtype).min)

        self.finish_with(finish)

    def own(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden]. Returns the logits of this rank's tokens, [R, their number]."""
        return self._finished(self._product(hidden), None)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, hidden]. Returns [R, vocab], in out when given."""
        if self._ranks.count == 1:
            return self._finished(self._product(hidden, out if self._finish is None else None), out)
        own = self._product(hidden)
        missing = _tokens_of_a_rank(self._vocab_size, self._ranks) - own.shape[1]
        logits = self._ranks.join(functional.pad(own, (0, missing)) if missing else own)[:, : self._vocab_size]
        return self._finished(logits.contiguous() if out is None else out.copy_(logits), out)

    def _finished(self, logits: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if self._finish is None:
            return logits
        return self._finish(logits.float() if out is None else out.copy_(logits))


def _no_logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    raise RuntimeError("the last stage of a pipeline alone computes logits")


def head(source: Source, embedding: Embedding, tied: bool, name: str = "lm_head", bias: bool = False) -> Head:
    """Return the layer that turns hidden states [R, hidden] into logits [R, vocab].

    tied: the layer shares the weights of the embedding; otherwise they have this name in the source. A bias always has
    it.
    """
    vocab_size, hidden_size = embedding.shape
    if not source.stage.is_last:
        return Head(_no_logits, vocab_size, source.ranks, source.dtype)
    if tied:
        added = source.take(f"{name}.bias", (vocab_size,), (_own_tokens(vocab_size, source.ranks),)) if bias else None
        return Head(embedding.as_head(added), vocab_size, source.ranks, source.dtype)
    shard = _Tokens(source.ranks)
    linear = Linear(source, [name], [vocab_size], hidden_size, bias=bias, shard=shard, sensitive=True)
    return Head(linear, vocab_size, source.ranks, source.dtype)


def float32_head(source: Source, embedding: Embedding, name: str = "lm_head") -> Head:
    """Return the layer that has weights of its own, as `head` does. It computes in float32."""
    made = head(source.in_dtype(torch.float32), embedding, False, name)
    made.begin_with(lambda hidden: hidden.float())
    return made


def unit_head(source: Source, embedding: Embedding, name: str = "lm_head") -> Head:
    """As `head` does for one that is not tied, but the weights of each token are scaled to length 1."""
    vocab_size, hidden_size = embedding.shape
    if not source.stage.is_last:
        return Head(_no_logits, vocab_size, source.ranks, source.dtype)
    own = _own_tokens(vocab_size, source.ranks)
    weight = functional.normalize(source.weight(name, vocab_size, hidden_size, own).float()).to(source.dtype)
    return Head(Dense(weight, None, source.ops), vocab_size, source.ranks, source.dtype)
