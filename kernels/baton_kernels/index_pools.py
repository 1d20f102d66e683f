"""Keys of groups of tokens, and the slots of the tokens of selected groups (reference/index_pools.py)."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs

_SLOTS = 512  # of one program


# One compiled kernel serves all steps: positions and slots are rows of one tensor, and only some rows begin at a
# multiple of 16 bytes.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rows_kernel(
    projected, weight, bias, slots, index_rows, eps, stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_DIM)
    inside = lane < DIM
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    given, to = projected + token * stride + lane, index_rows + slot * (2 * DIM) + lane
    key = tl.load(given, mask=inside, other=0.0).to(tl.float32)
    centered = tl.where(inside, key - tl.sum(key) / DIM, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered) / DIM + eps)
    factor, offset = tl.load(weight + lane, mask=inside, other=0.0), tl.load(bias + lane, mask=inside, other=0.0)
    tl.store(to, (centered * scale * factor + offset).to(index_rows.dtype.element_ty), mask=inside)
    tl.store(to + DIM, tl.load(given + DIM, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _pool_kernel(
    offsets, positions, slots, index_rows,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_DIM)
    inside = lane < DIM
    wait_for_inputs(OVERLAP)
    slot = tl.load(slots + token)
    if (slot < 0) | (tl.load(positions + token) % SIZE != SIZE - 1):
        return
    peak = tl.full([BLOCK_DIM], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_DIM], tl.float32)
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    # The blocks of a group's tokens are one block.
    first = index_rows + (slot + 1 - SIZE) * (2 * DIM) + lane
    for place in range(0, SIZE):
        at = first + place * (2 * DIM)
        gate = tl.load(at + DIM, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(offsets + place * DIM + lane, mask=inside, other=0.0)
        key = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(peak, gate)
        # Before a gate above -inf, the differences would be NaN.
        shrink = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - top))
        share = tl.where(gate == float("-inf"), 0.0, tl.exp(gate - top))
        total = total * shrink + share
        acc = acc * shrink + share * key
        peak = top
    # All threads have read the row of the last token before one of them changes it.
    tl.debug_barrier()
    tl.store(first + (SIZE - 1) * (2 * DIM), (acc / total).to(index_rows.dtype.element_ty), mask=inside)


def pool_index_keys(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    offsets: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    index_rows: torch.Tensor,
) -> None:
    """Compute pool_index_keys_reference. Rows of projected are contiguous, and the other tensors altogether."""
    tokens, (size, dim) = len(projected), offsets.shape
    sizes = {"DIM": dim, "BLOCK_DIM": triton.next_power_of_2(dim)}
    options = {"num_warps": 1, **overlap_options(projected.device)}
    _rows_kernel[(tokens,)](
        projected, weight, bias, slots, index_rows, eps, projected.stride(0), **sizes, **options
    )  # fmt: skip
    # The tokens of a group may be in one step, so that this kernel needs the results of the first one.
    _pool_kernel[(tokens,)](offsets, positions, slots, index_rows, **sizes, SIZE=size, **options)


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["table_stride", "width"])
def _pool_slots_kernel(
    numbers, lengths, rows, tables, out, table_stride, width,
    MOST: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    query = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + query)
    table = tables + tl.load(rows + query).to(tl.int64) * table_stride
    selected = tl.minimum(length // SIZE, MOST) * SIZE
    end = selected + length % SIZE
    wait_for_inputs(OVERLAP)
    number = tl.load(numbers + query * MOST + place // SIZE, mask=place < selected, other=0)
    position = tl.where(place < selected, number * SIZE + place % SIZE, length // SIZE * SIZE + place - selected)
    block = tl.load(table + position // PAGE, mask=place < end, other=0)
    tl.store(out + query * width + place, block * PAGE + position % PAGE, mask=place < end)


def pool_slots(
    numbers: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, tables: torch.Tensor, page: int, size: int
) -> torch.Tensor:
    """Return the slots in the cache of the tokens of selected groups and then of the tokens after the last group that
    has ended, [T, most * size + size - 1] int32.

    numbers: [T, most] int32, the selected groups, as select_numbers returns them. lengths: [T] int32, the tokens that
    each query sees. rows: [T] int64, each query's row of tables. tables: [rows, most blocks] int32. page: tokens of a
    block. size: tokens of a group. What lies beyond a query's slots is undefined. A slot is block * page + offset.
    """
    queries, most = numbers.shape
    width = most * size + size - 1
    out = torch.empty((queries, width), dtype=torch.int32, device=numbers.device)
    _pool_slots_kernel[(queries, triton.cdiv(width, _SLOTS))](
        numbers, lengths, rows, tables, out, tables.stride(0), width, MOST=most, SIZE=size, PAGE=page, BLOCK=_SLOTS,
        num_warps=4, **overlap_options(numbers.device),
    )  # fmt: skip
    return out
