"""Masks packed as bits, against the reference and against their definition, token by token."""

import pytest
import torch

from baton_kernels.reference.masks import apply_masks_reference

_OFF = float("-inf")


def pack(allowed: torch.Tensor) -> torch.Tensor:
    """Return [M, vocab] bool as bits, [M, words] int32."""
    count, vocab = allowed.shape
    padded = torch.zeros(count, -(-vocab // 32) * 32, dtype=torch.int64, device=allowed.device)
    padded[:, :vocab] = allowed
    # Bits beyond the vocabulary are not read.
    padded[:, vocab:] = 1
    powers = 2 ** torch.arange(32, device=allowed.device)
    return (padded.view(count, -1, 32) * powers).sum(dim=-1).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [17, 4096, 5003])
def test_matches_the_definition(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    from baton_kernels.masks import apply_masks

    logits = (torch.randn(6, vocab, device=device) * 3).to(dtype)
    rows = torch.tensor([5, 0, 0, 3, 2, 1], device=device)
    mask_rows = torch.tensor([2, 0, 1, 1, 3, 2], device=device)
    allowed = torch.rand(4, vocab, device=device) < 0.3
    allowed[3] = False
    allowed[3, vocab - 1] = True
    before = logits[rows].float() + 1
    # All tokens that the third draw's mask allows are banned, and the fifth draw's mask allows a single token.
    before[2, allowed[1]] = _OFF
    before[4, vocab - 1] = _OFF
    for function in (apply_masks, apply_masks_reference):
        scores = before.clone()
        function(scores, logits, rows, pack(allowed), mask_rows)
        for at in range(6):
            mask = allowed[mask_rows[at]]
            kept = before[at] if at not in (2, 4) else logits[rows[at]].float()
            assert torch.equal(scores[at], torch.where(mask, kept, _OFF)), (function, at)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_logit_that_is_not_finite_stays_whatever_the_mask_says(
    device: torch.device, bad: float, hidden: bool
) -> None:
    from baton_kernels.masks import apply_masks

    logits = torch.zeros(2, 100, device=device)
    logits[1, 70] = bad
    allowed = torch.ones(1, 100, dtype=torch.bool, device=device)
    allowed[0, 70] = not hidden
    rows, mask_rows = torch.tensor([0, 1], device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for function in (apply_masks, apply_masks_reference):
        for empty in (False, True):
            scores = logits.clone()
            if empty:
                scores[:] = _OFF
            function(scores, logits, rows, pack(allowed), mask_rows)
            assert not scores[1, 70] < float("inf")
            assert (scores[0] < float("inf")).all()
