"""A router that takes the experts of a token from a table."""

from dataclasses import replace

import torch

from baton_engine.config import ConfigError
from baton_engine.inputs import NUMBERS, InputRows
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing, own_numbers, scores_of, weights_of


class TableRouter:
    """Each token of the vocabulary has its experts. Their scores depend on the hidden state, as in Router (Roller et
    al., "Hash Layers For Large Sparse Models", 2021; DeepSeek-AI, DeepSeek-V4, 2026).

    vocab: tokens of the vocabulary. Raises ConfigError for a table that names an expert that there is not.
    """

    def __init__(self, source: Source, routing: Routing, experts: int, hidden: int, vocab: int) -> None:
        # Scores are computed in float32, as other routers do.
        self._weight = source.take("weight", (experts, hidden), dtype=torch.float32)
        self._ops, self.inputs = source.ops, NUMBERS
        stored = source.stored_dtype("tid2eid")
        whole = stored if stored in (torch.int32, torch.int64) else torch.int64
        self._table = source.take("tid2eid", (vocab, routing.count), dtype=whole).long()
        wrong = (
            self._table[(self._table < 0) | (self._table >= experts)] if not self._table.is_meta else self._table[:0]
        )
        if wrong.numel():
            raise ConfigError(
                f"{source.full_name('tid2eid')} names the expert {int(wrong[0])}; the experts of a layer are 0 to "
                f"{experts - 1}"
            )
        own = source.own_experts(experts)
        self._routing = replace(routing, own=own) if len(own) < experts else routing

    def __call__(self, x: InputRows, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [T, hidden]. ids: [T] int64, of the tokens. Returns what Router does."""
        assert isinstance(x, torch.Tensor)
        scores = scores_of(self._ops.linear(x.float(), self._weight), self._routing)
        experts = self._table[ids]
        weights = weights_of(scores.gather(1, experts), self._routing)
        return x, weights, own_numbers(experts, self._routing).int()
