"""The inputs of a decode step on the device. The host sends rows, positions and the blocks of these positions; the rest
is looked up there by row."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs


@triton.jit(do_not_specialize=["count", "stride", "table_stride", "group_stride", "rows"])
def _unpack_kernel(
    packed, columns, tables, ints, lengths, floats, count, stride, table_stride, group_stride, rows,
    GROUPS: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(packed + at, mask=inside, other=0)
    position = tl.load(packed + count + at, mask=inside, other=0)
    token = tl.maximum(tl.load(columns + row, mask=inside, other=0), 0)
    tl.store(ints + at, token, mask=inside)
    tl.store(ints + stride + at, row, mask=inside)
    tl.store(ints + 2 * stride + at, position, mask=inside)
    tl.store(ints + 3 * stride + at, position + 1, mask=inside)
    tl.store(lengths + at, (position + 1).to(tl.int32), mask=inside)
    for field in tl.static_range(3):
        value = tl.load(columns + (1 + field) * rows + row, mask=inside, other=0)
        tl.store(ints + (4 + field) * stride + at, value, mask=inside)
    for field in tl.static_range(3):
        bits = tl.load(columns + (4 + field) * rows + row, mask=inside, other=0).to(tl.int32)
        tl.store(floats + field * stride + at, bits.to(tl.float32, bitcast=True), mask=inside)
    real = inside & (row < rows - 1)
    for group in tl.static_range(GROUPS):
        block = tl.load(packed + (2 + group) * count + at, mask=inside, other=0)
        table = tables + row * table_stride + group * group_stride
        tl.store(table + position // PAGE, block.to(tl.int32), mask=real)
        tl.store(ints + (7 + group) * stride + at, tl.where(real, block * PAGE + position % PAGE, -1), mask=inside)
        for lag in tl.static_range(1, RECENT):
            before = position - lag
            exists = real & (before >= 0)
            # This program has just written the block of `position` into the table.
            same = before // PAGE == position // PAGE
            other = tl.load(table + before // PAGE, mask=exists & (same == 0), other=0).to(tl.int64)
            slot = tl.where(exists, tl.where(same, block, other) * PAGE + before % PAGE, -1)
            tl.store(ints + (7 + lag * GROUPS + group) * stride + at, slot, mask=inside)


class DecodeInputs:
    """Device tensors of a decode step for a fixed number of sequences; `unpack` fills them.

    slots: [groups of layers * recent tokens, sequences] int64: of the input tokens in each group, then of the tokens
    before them, and so on.
    """

    def __init__(self, count: int, device: torch.device, num_groups: int = 1, recent_tokens: int = 1) -> None:
        self._recent_tokens = recent_tokens
        self.packed = torch.zeros(2 + num_groups, count, dtype=torch.int64, device=device)
        # Each row begins at a multiple of 16 bytes: Triton compiles a kernel again for pointers of another alignment.
        stride = -(-count // 4) * 4
        self._ints = torch.zeros(7 + num_groups * recent_tokens, stride, dtype=torch.int64, device=device)[:, :count]
        self._floats = torch.zeros(3, stride, dtype=torch.float32, device=device)[:, :count]
        self.token_ids, self.rows, self.positions, self.next_positions = self._ints[:4]
        self.choices, self.seeds, self.top_ks = self._ints[4:7]
        self.slots = self._ints[7:]
        self.temperatures, self.top_ps, self.min_ps = self._floats
        self.lengths = torch.ones(count, dtype=torch.int32, device=device)

    def unpack(self, columns: torch.Tensor, tables: torch.Tensor, block_size: int) -> None:
        """Fill the tensors from `packed`, and write its blocks into the tables.

        columns: [FIELDS, rows] int64, and tables: [rows, groups of layers, most blocks] int32, both contiguous;
        reference/decode_inputs.py describes them.
        """
        count = self.packed.shape[1]
        _unpack_kernel[(triton.cdiv(count, 128),)](
            self.packed, columns, tables, self._ints, self.lengths, self._floats,
            count, self._ints.stride(0), tables.stride(0), tables.stride(1), columns.stride(0),
            GROUPS=len(self.packed) - 2, RECENT=self._recent_tokens, PAGE=block_size, BLOCK=128, num_warps=4,
            **overlap_options(self.packed.device),
        )  # fmt: skip
