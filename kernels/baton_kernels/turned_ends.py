"""Rotates the ends of heads, and norms and writes the keys of compressed attention. reference/compression.py defines
both."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs

_HEADS = 8  # of one program


# One compiled kernel serves all steps: positions and slots are rows of one tensor, and only some rows begin at a
# multiple of 16 bytes.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _turn_ends_kernel(
    x, norm, cos, sin, positions, slots, out, eps, token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BACK: tl.constexpr, UNIT: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """UNIT: heads are divided by their root mean square. NORM: they are multiplied by weights after that. SLOTS: the
    result of a token goes to its slot."""
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_DIM)
    turned = (column >= DIM - 2 * PAIRS) & (column < DIM)
    place = tl.where(turned, column - (DIM - 2 * PAIRS), 0)
    # The other element of the pair.
    other = tl.where(turned, DIM - 2 * PAIRS + (place ^ 1), 0)
    wait_for_inputs(OVERLAP)
    row = token
    if SLOTS:
        row = tl.load(slots + token)
        if row < 0:
            return
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * PAIRS + place // 2, mask=turned, other=1.0)
    s = tl.load(sin + position * PAIRS + place // 2, mask=turned, other=0.0)
    # first * cos - second * sin, and second * cos + first * sin.
    s = tl.where((place % 2 == 0) != BACK, -s, s)
    at = x + token * token_stride + head[:, None] * DIM
    inside = (head < HEADS)[:, None] & (column < DIM)[None, :]
    own = tl.load(at + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(at + other[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
    if UNIT:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / DIM + eps)[:, None]
        own *= scale
        partner *= scale
    if NORM:
        own *= tl.load(norm + column, mask=column < DIM, other=0.0)[None, :]
        partner *= tl.load(norm + other, mask=turned, other=0.0)[None, :]
    to = out + row * (HEADS * DIM) + head[:, None] * DIM + column[None, :]
    tl.store(to, (own * c[None, :] + partner * s[None, :]).to(out.dtype.element_ty), mask=inside)


def turn_ends(
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    *,
    back: bool = False,
    eps: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute turn_ends_reference. The heads of a token are contiguous, and the other tensors altogether."""
    tokens, heads, dim = x.shape
    out = x.new_empty(x.shape) if out is None else out
    block = min(triton.next_power_of_2(heads), _HEADS)
    _turn_ends_kernel[(tokens, triton.cdiv(heads, block))](
        x, *rotary[:1], *rotary, positions, positions, out, eps or 0.0, x.stride(0), HEADS=heads, DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim), PAIRS=rotary[0].shape[1], BLOCK_HEADS=block, BACK=back,
        UNIT=eps is not None, NORM=False, SLOTS=False, num_warps=4, **overlap_options(x.device),
    )  # fmt: skip
    return out


def keep_key(
    kv: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    """Compute keep_key_reference. Rows of kv are contiguous, and the other tensors altogether."""
    tokens, dim = kv.shape
    _turn_ends_kernel[(tokens, 1)](
        kv, norm, *rotary, positions, slots, keys, eps, kv.stride(0), HEADS=1, DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim), PAIRS=rotary[0].shape[1], BLOCK_HEADS=1, BACK=False, UNIT=True,
        NORM=True, SLOTS=True, num_warps=4, **overlap_options(kv.device),
    )  # fmt: skip
