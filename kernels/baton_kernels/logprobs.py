"""Logprobs of chosen tokens and their ranks, without a softmax over the vocabulary in memory."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _logprobs_kernel(logits, tokens, logprobs, ranks, norms, vocab, BLOCK: tl.constexpr):
    at = tl.program_id(0)
    row = logits + at.to(tl.int64) * vocab
    chosen = tl.load(row + tl.load(tokens + at)).to(tl.float32)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    higher = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, logit)
        higher += (logit > chosen).to(tl.int32)
    top = tl.max(tops, axis=0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        sums += tl.exp(logit - top)
    log_sum = tl.log(tl.sum(sums, axis=0))
    tl.store(logprobs + at, chosen - top - log_sum)
    tl.store(ranks + at, (tl.sum(higher, axis=0) + 1).to(tl.int64))
    tl.store(norms + at * 2, top)
    tl.store(norms + at * 2 + 1, log_sum)


def chosen_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute chosen_logprobs_reference in two passes over logits, which must be contiguous."""
    rows, vocab = logits.shape
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    norms = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    if rows:
        _logprobs_kernel[(rows,)](logits, tokens, logprobs, ranks, norms, vocab, BLOCK=_BLOCK, num_warps=16)
    return logprobs, ranks, norms
