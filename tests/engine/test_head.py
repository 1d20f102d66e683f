"""The output layer with what a family does to its logits."""

import pytest
import torch

from baton_engine.layers.embedding import Head
from baton_engine.shard import ALONE


@pytest.mark.parametrize("given", [True, False])
def test_logits_near_a_softcap_keep_their_order(given: bool) -> None:
    plain = torch.tensor([[100.0, 101.0, 99.5, -3.0]], dtype=torch.bfloat16)

    def product(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return plain.clone() if out is None else out.copy_(plain)

    head = Head(product, 4, ALONE, torch.bfloat16)
    assert head(torch.ones(1, 1)).dtype == head.dtype == torch.bfloat16
    head.finish_with(lambda logits: logits.div_(30).tanh_().mul_(30))
    out = torch.empty(1, 4, dtype=head.dtype) if given else None
    logits = head(torch.ones(1, 1), out)
    assert torch.equal(logits, 30 * (plain.float() / 30).tanh())
    assert torch.equal(head.own(torch.ones(1, 1)), logits)
    assert logits.argsort(descending=True).tolist() == [[1, 0, 2, 3]]
    assert out is None or out.data_ptr() == logits.data_ptr()


class SecondOfTwo:
    """Implements Ranks. The first rank has the tokens 0 to 3, whose logits are 9, and this one 4 to 6."""

    rank, count = 1, 2

    def join(self, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(y, 9), y], dim=1)


def test_tokens_that_are_never_drawn() -> None:
    excluded = torch.tensor([True, False, False, False, False, True, False])
    own = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    head = Head(lambda hidden: own.clone(), 7, SecondOfTwo(), torch.bfloat16)  # type: ignore[arg-type]
    head.exclude(excluded)
    least = torch.finfo(torch.float32).min
    assert head.own(torch.ones(1, 1)).tolist() == [[1, least, 3]]
    assert head(torch.ones(1, 1)).tolist() == [[least, 9, 9, 9, 1, least, 3]]
