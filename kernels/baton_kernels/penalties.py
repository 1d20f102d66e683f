"""Repetition, presence and frequency penalties, from a table of each sequence's tokens that stays on the device.

Repetition: Keskar et al., "CTRL" (2019). Presence and frequency: OpenAI's API reference.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _penalties_kernel(
    scores, history, rows, prompt_lens, lengths, repetitions, presences, frequencies, counts, vocab, max_len,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetitions + at)
    presence, frequency = tl.load(presences + at), tl.load(frequencies + at)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        tokens = history + tl.load(rows + at) * max_len
        prompt_len, length = tl.load(prompt_lens + at), tl.load(lengths + at)
        start = tl.where(repetition != 1, 0, prompt_len)
        # Only the counts of tokens that occur are written or read, in three passes over the sequence's tokens and none
        # over the vocabulary. Each pass must end before the next, which reads counts that other threads wrote.
        for first in range(start, length, BLOCK):
            index = first + tl.arange(0, BLOCK)
            token = tl.load(tokens + index, mask=index < length, other=0)
            tl.store(counts + at * vocab + token, 0, mask=index < length)
        tl.debug_barrier()
        for first in range(prompt_len, length, BLOCK):
            index = first + tl.arange(0, BLOCK)
            token = tl.load(tokens + index, mask=index < length, other=0)
            tl.atomic_add(counts + at * vocab + token, 1, mask=index < length)
        tl.debug_barrier()
        for first in range(start, length, BLOCK):
            index = first + tl.arange(0, BLOCK)
            token = tl.load(tokens + index, mask=index < length, other=0)
            # Only the thread that takes the count changes the score, so that a token that occurs twice changes once.
            count = tl.atomic_xchg(counts + at * vocab + token, -1, mask=index < length)
            mine = (index < length) & (count >= 0)
            score = tl.load(scores + at * vocab + token, mask=mine, other=0.0)
            score = tl.where(
                score > 0, tl.div_rn(score, repetition + tl.zeros([BLOCK], tl.float32)), score * repetition
            )
            score -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
            tl.store(scores + at * vocab + token, score, mask=mine)


def apply_penalties(
    scores: torch.Tensor,
    history: torch.Tensor,
    rows: torch.Tensor,
    prompt_lens: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Compute apply_penalties_reference in time that grows with the lengths and not with vocab. scores and history must
    be contiguous, and the tokens of history in [0, vocab)."""
    count, vocab = scores.shape
    if count:
        counts = torch.empty((count, vocab), dtype=torch.int32, device=scores.device)
        _penalties_kernel[(count,)](
            scores, history, rows, prompt_lens, lengths, repetition, presence, frequency, counts, vocab,
            history.shape[1], BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
