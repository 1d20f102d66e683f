"""The choice of each token's experts.

For few tokens, one kernel computes the product with the router's weight, and the program that finishes the last logit
of a token chooses its experts. That kernel may also compute the RMSNorm before the router. For more tokens there are
two kernels: one for the product, and one that chooses experts with one program per token.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .kernel_configs import LinearConfig
from .linear import linear
from .norm import computed, normed_row
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .parts import arrivals_of
from .reference.norm import PendingNorm
from .reference.routing import NOT_OWN, Routing
from .state_blocks import softplus

_NOT_OWN = tl.constexpr(NOT_OWN)
_LOW = tl.constexpr((1 << 31) - 1)
_NONE = tl.constexpr(-1 << 63)  # below all keys
# Up to this many tokens, a separate kernel for the choice takes longer than reading the router's weight once per token.
MOST_IN_ONE_KERNEL = 16
_EXPERTS_OF_PROGRAM = 2
_INNER_AT_ONCE = 2048
# Keyed by the most tokens that each is for. A router has few outputs, so the inner dimension is cut into parts as long
# as there are few tokens.
BY_TOKENS = {256: LinearConfig(16, 16, 128, 4, 4, 2), 1024: LinearConfig(32, 32, 128, 2, 4, 3)}
FIXED = LinearConfig(64, 64, 64, 1, 4, 4)


@triton.jit
def _flipped(bits):
    """Return int32 with the lower bits of negative numbers flipped."""
    return bits ^ ((bits >> 31) & _LOW)


@triton.jit
def _logits(at, mask, CAP: tl.constexpr):
    """Return logits, -inf outside the mask. CAP: the softcap of Routing."""
    logits = tl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    if CAP > 0:
        # tanh through exp: cap * (1 - 2 / (e^2x + 1)).
        logits = tl.where(mask, CAP * (1 - 2 / (tl.exp(logits * (2 / CAP)) + 1)), float("-inf"))
    return logits


@triton.jit
def _choose(
    logits, correction, scales, weights, experts, scale, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr, USED: tl.constexpr, GROUP_BEST: tl.constexpr, SIGMOID: tl.constexpr, ROOT: tl.constexpr,
    NORMALIZE: tl.constexpr, NEAR: tl.constexpr, CORRECTED: tl.constexpr, LOGITS: tl.constexpr, CAP: tl.constexpr,
    SCALED: tl.constexpr, OWN_FIRST: tl.constexpr, OWN_END: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token. logits, weights and experts point to those of the token."""
    member = tl.arange(0, BLOCK_SIZE)[None, :]
    real = (tl.arange(0, BLOCK_GROUPS) < GROUPS)[:, None] & (member < SIZE)
    expert = tl.where(real, tl.arange(0, BLOCK_GROUPS)[:, None] * SIZE + member, EXPERTS)
    scores = _logits(logits + expert, real, CAP)
    # Sigmoids of large logits are equal in float32, so the logits are compared where no correction is added.
    PLAIN: tl.constexpr = SIGMOID and (LOGITS or (not CORRECTED and USED == GROUPS))
    if SIGMOID and not PLAIN:
        scores = 1 / (1 + tl.exp(-scores))
    elif ROOT:
        scores = tl.where(real, tl.sqrt(softplus(scores)), float("-inf"))
    elif not SIGMOID and NEAR == 0:
        most = tl.max(tl.max(scores, axis=1), axis=0)
        scores = tl.exp(scores - most)
        total = tl.sum(tl.sum(scores, axis=1), axis=0)
        scores = scores / total
    left = scores
    if CORRECTED:
        left += tl.load(correction + expert, mask=real, other=0.0)
    left = tl.where(real, left, float("-inf"))
    if USED < GROUPS:
        best = tl.max(left, axis=1)
        if GROUP_BEST == 2:
            first = tl.min(tl.where(left == best[:, None], member, BLOCK_SIZE), axis=1)
            best += tl.max(tl.where(member == first[:, None], float("-inf"), left), axis=1)
        group = tl.arange(0, BLOCK_GROUPS)
        used = group < 0
        for _ in tl.static_range(USED):
            winner = tl.min(tl.where(best == tl.max(best, axis=0), group, BLOCK_GROUPS), axis=0)
            used = used | (group == winner)
            best = tl.where(group == winner, float("-inf"), best)
        left = tl.where(used[:, None], left, float("-inf"))
    # Bits of floats, those of negative numbers flipped, are integers of the same order; NaN comes first. Scores in the
    # upper half and experts in the lower one let a single maximum find both. Of equal scores the first expert wins.
    bits = tl.where(left == left, left.to(tl.int32, bitcast=True), 0x7FC00000)
    keys = (_flipped(bits).to(tl.int64) << 32) | (expert ^ _LOW).to(tl.int64)
    keys = tl.where(real, keys, _NONE)
    choice = tl.arange(0, BLOCK_COUNT)
    found = tl.zeros([BLOCK_COUNT], tl.int64)
    shares = tl.zeros([BLOCK_COUNT], tl.float32)
    for number in tl.static_range(COUNT):
        key = tl.max(tl.max(keys, axis=1), axis=0)
        if NEAR > 0:
            top = _flipped((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            # The comparison must not leave out a logit that is not finite.
            far = (top - left) / tl.maximum(tl.abs(left), top) > NEAR
            parts = tl.where(far | (keys == _NONE), 0.0, tl.exp(left - top))
            shares = tl.where(choice == number, 1 / tl.sum(tl.sum(parts, axis=1), axis=0), shares)
        found = tl.where(choice == number, key, found)
        keys = tl.where(keys == key, _NONE, keys)
    chosen = (found & _LOW).to(tl.int32) ^ _LOW
    weight = _flipped((found >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    if NEAR > 0:
        weight = shares
    elif PLAIN and not CORRECTED:
        weight = tl.where(choice < COUNT, 1 / (1 + tl.exp(-weight)), 0.0)
    elif CORRECTED:
        weight = _logits(logits + chosen, choice < COUNT, CAP)
        if SIGMOID:
            weight = 1 / (1 + tl.exp(-weight))
        elif ROOT:
            weight = tl.where(choice < COUNT, tl.sqrt(softplus(weight)), 0.0)
        else:
            weight = tl.exp(weight - most) / total
    if NORMALIZE > 0:
        weight = weight / (tl.sum(weight, axis=0) + NORMALIZE)
    weight *= scale
    if SCALED:
        weight *= tl.load(scales + chosen, mask=choice < COUNT, other=0.0)
    chosen = tl.where((chosen >= OWN_FIRST) & (chosen < OWN_END), chosen - OWN_FIRST, _NOT_OWN)
    tl.store(experts + choice, chosen, mask=choice < COUNT)
    tl.store(weights + choice, weight, mask=choice < COUNT)


@triton.jit
def _choose_experts_kernel(
    logits, correction, scales, weights, experts, scale, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr, USED: tl.constexpr, GROUP_BEST: tl.constexpr, SIGMOID: tl.constexpr, ROOT: tl.constexpr,
    NORMALIZE: tl.constexpr, NEAR: tl.constexpr, CORRECTED: tl.constexpr, LOGITS: tl.constexpr, CAP: tl.constexpr,
    SCALED: tl.constexpr, OWN_FIRST: tl.constexpr, OWN_END: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    _choose(
        logits + token * EXPERTS, correction, scales, weights + token * COUNT, experts + token * COUNT, scale,
        EXPERTS, GROUPS, SIZE, BLOCK_GROUPS, BLOCK_SIZE, COUNT, BLOCK_COUNT, USED, GROUP_BEST, SIGMOID, ROOT, NORMALIZE,
        NEAR, CORRECTED, LOGITS, CAP, SCALED, OWN_FIRST, OWN_END,
    )  # fmt: skip


@triton.jit
def _route_kernel(
    x, residual, total, norm, normed, router, bias, logits, arrivals, correction, scales, weights, experts, scale, eps,
    INNER: tl.constexpr, BLOCK_INNER: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr,
    USED: tl.constexpr, GROUP_BEST: tl.constexpr, SIGMOID: tl.constexpr, ROOT: tl.constexpr, NORMALIZE: tl.constexpr,
    NEAR: tl.constexpr, CORRECTED: tl.constexpr, LOGITS: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr,
    OWN_FIRST: tl.constexpr, OWN_END: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    inner = tl.arange(0, BLOCK_INNER)
    real = expert < EXPERTS
    at = router + expert[:, None] * INNER + inner[None, :]
    w = tl.load(at, mask=real[:, None] & (inner < INNER)[None, :], other=0.0)
    if NORM:
        scales = tl.load(norm + inner, mask=inner < INNER, other=0.0)
    wait_for_inputs(OVERLAP)
    cell = token * INNER + inner
    values = tl.load(x + cell, mask=inner < INNER, other=0.0)
    if NORM:
        if ADD:
            added = values.to(tl.float32) + tl.load(residual + cell, mask=inner < INNER, other=0.0)
            values = added.to(values.dtype)
        # Every program computes the norm, and the first one stores it for the experts.
        mine = (inner < INNER) & (tl.program_id(0) == 0)
        tl.store(total + cell, values, mask=mine)
        values = normed_row(values, scales, eps, INNER)
        tl.store(normed + cell, values, mask=mine)
    acc = w.to(tl.float32) * values.to(tl.float32)[None, :]
    for first in tl.static_range(BLOCK_INNER, INNER, BLOCK_INNER):
        known = first + inner < INNER
        w = tl.load(at + first, mask=real[:, None] & known[None, :], other=0.0)
        values = tl.load(x + token * INNER + first + inner, mask=known, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * values
    logit = tl.sum(acc, axis=1)
    if BIAS:
        logit += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    tl.store(logits + token * EXPERTS + expert, logit, mask=real)
    # All threads of this program store before the counter rises. By acq_rel, the program that counts last sees all
    # logits of the token.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + token, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrivals + token, 0)
        _choose(
            logits + token * EXPERTS, correction, scales, weights + token * COUNT, experts + token * COUNT, scale,
            EXPERTS, GROUPS, SIZE, BLOCK_GROUPS, BLOCK_SIZE, COUNT, BLOCK_COUNT, USED, GROUP_BEST, SIGMOID, ROOT,
            NORMALIZE, NEAR, CORRECTED, LOGITS, CAP, SCALED, OWN_FIRST, OWN_END,
        )  # fmt: skip


@functools.cache
def _sizes(experts: int, routing: Routing, corrected: bool, scaled: bool) -> dict[str, Any]:
    """Return the parameters of _choose that are known when it is compiled."""
    assert routing.group_best <= 2, routing
    assert not (routing.near and (corrected or routing.sigmoid)), routing
    assert routing.sigmoid or not routing.corrects_logits, routing
    assert not (routing.root_softplus and (routing.sigmoid or routing.near)), routing
    # If all groups are used, they do not matter.
    groups = routing.groups if routing.used_groups < routing.groups else 1
    own = range(experts) if routing.own is None else routing.own
    return {
        "EXPERTS": experts,
        "GROUPS": groups,
        "SIZE": experts // groups,
        "BLOCK_GROUPS": triton.next_power_of_2(groups),
        "BLOCK_SIZE": triton.next_power_of_2(experts // groups),
        "COUNT": routing.count,
        "BLOCK_COUNT": triton.next_power_of_2(routing.count),
        "USED": routing.used_groups if groups > 1 else 1,
        "GROUP_BEST": routing.group_best,
        "SIGMOID": routing.sigmoid,
        "ROOT": routing.root_softplus,
        "NORMALIZE": routing.added if routing.normalize else 0.0,
        "NEAR": routing.near,
        "CORRECTED": corrected,
        "LOGITS": routing.corrects_logits,
        "CAP": routing.softcap,
        "SCALED": scaled,
        "OWN_FIRST": own.start,
        "OWN_END": own.stop,
    }


def _choices(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors for the weights and the experts of the tokens."""
    shape, device = (len(logits), count), logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def choose(
    logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute choose_reference for float32 logits. Of experts with equal scores, the one with the smallest number comes
    first."""
    tokens, experts = logits.shape
    weights, chosen = _choices(logits, routing.count)
    _choose_experts_kernel[(tokens,)](
        logits, logits if correction is None else correction, logits if scales is None else scales, weights, chosen,
        routing.scale, num_warps=1 if experts <= 512 else 4,
        **_sizes(experts, routing, correction is not None, scales is not None),
        **overlap_options(logits.device),
    )  # fmt: skip
    return weights, chosen


def route(
    x: torch.Tensor | PendingNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    routing: Routing,
    scales: torch.Tensor | None = None,
    config: LinearConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute route_reference. x and weight are contiguous. config: the configuration of a separate kernel for the
    product; None = what is fastest for the number of tokens."""
    norm = x if isinstance(x, PendingNorm) else PendingNorm(x, None, x, 0.0, x)
    tokens, (experts, inner) = len(norm.x), weight.shape
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=weight.device)
    if config is None and tokens <= MOST_IN_ONE_KERNEL:
        rows = torch.empty_like(norm.x) if norm is x else norm.x
        weights, chosen = _choices(logits, routing.count)
        # The sum of squares is that of one block.
        block = triton.next_power_of_2(inner)
        _route_kernel[(triton.cdiv(experts, _EXPERTS_OF_PROGRAM), tokens)](
            norm.x, norm.x if norm.residual is None else norm.residual, norm.total, norm.weight, rows, weight,
            weight if bias is None else bias, logits, arrivals_of(weight.device),
            logits if correction is None else correction, logits if scales is None else scales, weights, chosen,
            routing.scale, norm.eps, INNER=inner, BLOCK_INNER=block if norm is x else min(block, _INNER_AT_ONCE),
            BLOCK_EXPERTS=_EXPERTS_OF_PROGRAM, BIAS=bias is not None, NORM=norm is x, ADD=norm.residual is not None,
            num_warps=4, **_sizes(experts, routing, correction is not None, scales is not None),
            **overlap_options(weight.device),
        )  # fmt: skip
        return rows, weights, chosen
    if config is None:
        config = next((found for most, found in BY_TOKENS.items() if tokens <= most), FIXED)
    rows = computed(x)
    linear(rows, weight, bias, out=logits, config=config)
    return rows, *choose(logits, correction, routing, scales)


def route_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    routing: Routing,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute route_reference such that the bits of a token's weights do not depend on the other tokens."""
    return route(x, weight, bias, correction, routing, scales, FIXED)
