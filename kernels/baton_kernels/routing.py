"""The choice of each token's experts: the product with a router's weight, then a kernel with one program per token."""

import torch
import triton
import triton.language as tl

from .linear import linear
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.routing import TINY, Routing
from .tuning import LinearConfig

_TINY = tl.constexpr(TINY)
# By the most rows that each is for. A router has few outputs, so the inner dimension is cut into parts as long as there
# are few rows.
BY_ROWS = {
    4: LinearConfig(1, 2, 1024, 1, 4, 1),
    256: LinearConfig(16, 16, 128, 4, 4, 2),
    1024: LinearConfig(32, 32, 128, 2, 4, 3),
}
FIXED = LinearConfig(64, 64, 64, 1, 4, 4)


@triton.jit
def _route_kernel(
    logits, correction, weights, experts, scale, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr,
    USED: tl.constexpr, GROUP_BEST: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    CORRECTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, BLOCK_SIZE)[None, :]
    real = (tl.arange(0, BLOCK_GROUPS) < GROUPS)[:, None] & (member < SIZE)
    expert = tl.where(real, tl.arange(0, BLOCK_GROUPS)[:, None] * SIZE + member, EXPERTS)
    if CORRECTED:
        added = tl.load(correction + expert, mask=real, other=0.0)
    wait_for_inputs(OVERLAP)
    scores = tl.load(logits + token * EXPERTS + expert, mask=real, other=float("-inf"))
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-scores))
    else:
        scores = tl.exp(scores - tl.max(tl.max(scores, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    left = scores
    if CORRECTED:
        left += added
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
    choice = tl.arange(0, BLOCK_COUNT)
    chosen = tl.zeros([BLOCK_COUNT], tl.int32)
    weight = tl.zeros([BLOCK_COUNT], tl.float32)
    for number in tl.static_range(COUNT):
        score = tl.max(tl.max(left, axis=1), axis=0)
        # Where a score is NaN no lane equals the maximum. Any expert will do then, if only there is such an expert.
        winner = tl.min(tl.min(tl.where(left == score, expert, EXPERTS), axis=1), axis=0)
        winner = tl.minimum(winner, EXPERTS - 1)
        if CORRECTED:
            score = tl.sum(tl.sum(tl.where(expert == winner, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(choice == number, winner, chosen)
        weight = tl.where(choice == number, score, weight)
        left = tl.where(expert == winner, float("-inf"), left)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, axis=0) + _TINY)
    tl.store(experts + token * COUNT + choice, chosen, mask=choice < COUNT)
    tl.store(weights + token * COUNT + choice, weight * scale, mask=choice < COUNT)


def choose(
    logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute choose_reference for float32 logits. Of experts with equal scores, the one with the smallest number comes
    first."""
    tokens, experts = logits.shape
    assert routing.group_best <= 2, routing
    weights = torch.empty(tokens, routing.count, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, routing.count, dtype=torch.int32, device=logits.device)
    # Without a choice between them, groups do not matter.
    groups = routing.groups if routing.used_groups < routing.groups else 1
    _route_kernel[(tokens,)](
        logits, logits if correction is None else correction, weights, chosen, routing.scale,
        EXPERTS=experts, GROUPS=groups, SIZE=experts // groups, BLOCK_GROUPS=triton.next_power_of_2(groups),
        BLOCK_SIZE=triton.next_power_of_2(experts // groups), COUNT=routing.count,
        BLOCK_COUNT=triton.next_power_of_2(routing.count), USED=routing.used_groups if groups > 1 else 1,
        GROUP_BEST=routing.group_best, SIGMOID=routing.sigmoid, NORMALIZE=routing.normalize,
        CORRECTED=correction is not None, num_warps=1 if experts <= 512 else 4, **overlap_options(logits.device),
    )  # fmt: skip
    return weights, chosen


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    routing: Routing,
    config: LinearConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute route_reference. x and weight are contiguous. config: of the product; None = by the number of tokens."""
    logits = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    if config is None:
        config = next((found for most, found in BY_ROWS.items() if len(x) <= most), FIXED)
    linear(x, weight, bias, out=logits, config=config)
    return choose(logits, correction, routing)


def route_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    routing: Routing,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute route_reference such that the bits of a token's weights do not depend on the other tokens."""
    return route(x, weight, bias, correction, routing, FIXED)
