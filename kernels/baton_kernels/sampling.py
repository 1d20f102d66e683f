"""The draw of a token from logits, without a softmax: argmax of logits / temperature + Gumbel noise.

The noise depends on the token's id and not on where its logit is, so ranks that have the logits of different tokens can
each find the best of theirs, and the best of those is the token that one process would draw.
"""

import torch
import triton
import triton.language as tl

from .not_finite import NOT_FINITE
from .overlap import let_next_start, overlap_options, wait_for_inputs

FEW_ROWS = 8
_BLOCK = 2048
_NOT_FINITE = tl.constexpr(NOT_FINITE)


@triton.jit
def _gumbel(counter, position, choice, seed, BLOCK: tl.constexpr):
    """Return the noise of tokens [4 * counter, 4 * counter + 3], flattened to BLOCK values."""
    r0, r1, r2, r3 = tl.philox(
        seed, counter.to(tl.uint32), position.to(tl.uint32), choice.to(tl.uint32), counter.to(tl.uint32) * 0
    )
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [BLOCK])
    uniform = (bits.to(tl.float32) + 1) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 1 - 5.960464477539063e-08)
    # log(1 - u) loses all digits of a small u; three terms of its series are exact to float32 there.
    small = uniform * (1 + uniform * (0.5 + uniform * 0.3333333333333333))
    exponential = tl.where(uniform < 0.0009765625, small, -tl.log(1 - uniform))
    return -tl.log(exponential)


@triton.jit
def _partial_kernel(
    logits, temperatures, thresholds, seeds, positions, choices, best_scores, best_tokens, vocab, first_token,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    threshold = tl.load(thresholds + row)
    seed, position, choice = tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row)
    span = tl.cdiv(tl.cdiv(vocab, BLOCK), PARTS) * BLOCK
    best, where = float("-inf"), part * span
    for first in range(part * span, tl.minimum((part + 1) * span, vocab), BLOCK):
        token = first + tl.arange(0, BLOCK)
        score = tl.load(logits + row.to(tl.int64) * vocab + token, mask=token < vocab, other=float("-inf"))
        score = score.to(tl.float32)
        # NaN becomes infinity, as its comparison is false. Infinity survives the threshold, the division and the noise.
        score = tl.where(score < float("inf"), score, float("inf"))
        score = tl.where(score < threshold, float("-inf"), score)
        if temperature > 0:
            counter = (first_token + first) // 4 + tl.arange(0, BLOCK // 4)
            score = score / temperature + _gumbel(counter, position, choice, seed, BLOCK)
        top = tl.max(score, axis=0)
        if top > best:
            best = top
            where = first + tl.argmax(score, axis=0)
    tl.store(best_scores + row * PARTS + part, best)
    tl.store(best_tokens + row * PARTS + part, tl.where(best == float("inf"), _NOT_FINITE, first_token + where))


@triton.jit
def _best_kernel(best_scores, best_tokens, out, PARTS: tl.constexpr, OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    at = row * PARTS + tl.arange(0, PARTS)
    score, winner = tl.max(tl.load(best_scores + at), axis=0, return_indices=True)
    tl.store(out + 2 * row, score)
    # The part that has a logit that is not finite wins.
    tl.store(out + 2 * row + 1, tl.load(best_tokens + row * PARTS + winner).to(tl.float32))


@triton.jit
def _best_of_shards_kernel(found, out, shards, BLOCK_SHARDS: tl.constexpr, OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    shard = tl.arange(0, BLOCK_SHARDS)
    at = found + (row * shards + shard) * 2
    score = tl.load(at, mask=shard < shards, other=float("-inf"))
    token = tl.load(at + 1, mask=shard < shards, other=float("inf"))
    # Of equal scores the smallest token wins. NOT_FINITE is below all tokens, and its score is the greatest.
    best = tl.where(score == tl.max(score, axis=0), token, float("inf"))
    tl.store(out + row, tl.min(best, axis=0).to(tl.int64))


@triton.jit
def _choose_kernel(best_scores, best_tokens, out, PARTS: tl.constexpr, OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    # Of equal scores the first one wins, as in the reference.
    winner = tl.argmax(tl.load(best_scores + row * PARTS + part), axis=0)
    token = tl.load(best_tokens + row * PARTS + winner)
    lowest = tl.min(tl.load(best_tokens + row * PARTS + part), axis=0)
    tl.store(out + row, tl.where(lowest < 0, lowest, token).to(tl.int64))


def gumbel_argmax(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    parts: int | None = None,
) -> torch.Tensor:
    """Compute gumbel_argmax_reference. logits must be contiguous. parts: programs per row, a power of two."""
    scores, tokens = _best_of_parts(logits, temperatures, thresholds, seeds, positions, choices, 0, parts)
    out = logits.new_empty(len(logits), dtype=torch.int64)
    options = overlap_options(logits.device)
    _choose_kernel[(len(logits),)](scores, tokens, out, PARTS=scores.shape[1], num_warps=1, **options)
    return out


def gumbel_best(
    logits: torch.Tensor,
    first_token: int,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
) -> torch.Tensor:
    """Compute gumbel_best_reference. logits must be contiguous."""
    least = torch.full_like(temperatures, float("-inf"))
    scores, tokens = _best_of_parts(logits, temperatures, least, seeds, positions, choices, first_token, None)
    out = logits.new_empty((len(logits), 2), dtype=torch.float32)
    options = overlap_options(logits.device)
    _best_kernel[(len(logits),)](scores, tokens, out, PARTS=scores.shape[1], num_warps=1, **options)
    return out


def best_of_shards(found: torch.Tensor) -> torch.Tensor:
    """Compute best_of_shards_reference. found must be contiguous."""
    rows, shards = len(found), found.shape[1] // 2
    out = torch.empty(rows, dtype=torch.int64, device=found.device)
    _best_of_shards_kernel[(rows,)](
        found, out, shards, BLOCK_SHARDS=triton.next_power_of_2(shards), num_warps=1, **overlap_options(found.device)
    )
    return out


def _best_of_parts(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    first_token: int,
    parts: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best score of each part of a row, [R, parts] float32, and its token, [R, parts] int32."""
    rows, vocab = logits.shape
    if parts is None:
        # With few rows, more programs for each of them keep the device busy.
        parts = 64 if rows <= FEW_ROWS else 16
    scores = logits.new_empty((rows, parts), dtype=torch.float32)
    tokens = logits.new_empty((rows, parts), dtype=torch.int32)
    _partial_kernel[(rows, parts)](
        logits, temperatures, thresholds, seeds, positions, choices, scores, tokens, vocab, first_token,
        PARTS=parts, BLOCK=_BLOCK, num_warps=4, **overlap_options(logits.device),
    )  # fmt: skip
    return scores, tokens
