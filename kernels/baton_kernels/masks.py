"""Masks of tokens that may be drawn, packed as bits."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _masked(scores, logits, masks, first, vocab, BLOCK: tl.constexpr):
    """Return for BLOCK tokens their new scores, and their logits with -inf for tokens that the mask forbids.

    A logit that is NaN or +inf appears in both, whatever the mask says.
    """
    token = first + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(masks + token // 32, mask=inside, other=0)
    allowed = ((word >> (token % 32)) & 1) != 0
    logit = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.load(scores + token, mask=inside, other=float("-inf"))
    # The comparison is false for NaN too.
    finite = logit < float("inf")
    return tl.where(finite, tl.where(allowed, score, float("-inf")), logit), tl.where(
        allowed | (logit >= float("inf")) | (logit != logit), logit, float("-inf")
    )


@triton.jit
def _masks_kernel(scores, logits, rows, masks, mask_rows, vocab, words, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    scores += at * vocab
    logits += tl.load(rows + at) * vocab
    masks += tl.load(mask_rows + at) * words
    some = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        score, _ = _masked(scores, logits, masks, first, vocab, BLOCK)
        # A NaN score compares as false. That does no harm, since the draw of its row fails in any case.
        some |= (score > float("-inf")).to(tl.int32)
        tl.store(scores + token, score, mask=token < vocab)
    if tl.max(some, axis=0) == 0:
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            _, own = _masked(scores, logits, masks, first, vocab, BLOCK)
            tl.store(scores + token, own, mask=token < vocab)


def apply_masks(
    scores: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor
) -> None:
    """As apply_masks_reference. scores, logits and masks are contiguous."""
    count, vocab = scores.shape
    if count:
        _masks_kernel[(count,)](
            scores, logits, rows, masks, mask_rows, vocab, masks.shape[1], BLOCK=_BLOCK, num_warps=8
        )
