"""What a decode step needs on the device, unpacked from the one small buffer that the host sends for it."""

import torch
import triton
import triton.language as tl

# Fields of a packed decode input, [FIELDS, sequences] int64. block: where this token's KV goes; -1 = nowhere.
# token: the input token; -1 = the last one sampled for the row. heat: the bits of a float32 temperature.
FIELDS = 7
ROW, POSITION, BLOCK, TOKEN, CHOICE, SEED, HEAT = range(FIELDS)


@triton.jit
def _unpack_kernel(
    packed, last_tokens, tables, token_ids, rows, positions, slots, lengths, next_positions, choices, seeds, heats,
    count, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(packed + at, mask=inside, other=0)
    position = tl.load(packed + count + at, mask=inside, other=0)
    block = tl.load(packed + 2 * count + at, mask=inside, other=-1)
    token = tl.load(packed + 3 * count + at, mask=inside, other=0)
    token = tl.where(token < 0, tl.load(last_tokens + row, mask=inside, other=0), token)
    tl.store(token_ids + at, token, mask=inside)
    tl.store(rows + at, row, mask=inside)
    tl.store(positions + at, position, mask=inside)
    tl.store(slots + at, tl.where(block < 0, -1, block * PAGE + position % PAGE), mask=inside)
    tl.store(lengths + at, (position + 1).to(tl.int32), mask=inside)
    tl.store(next_positions + at, position + 1, mask=inside)
    tl.store(tables + row * table_stride + position // PAGE, block.to(tl.int32), mask=inside & (block >= 0))
    tl.store(choices + at, tl.load(packed + 4 * count + at, mask=inside, other=0), mask=inside)
    tl.store(seeds + at, tl.load(packed + 5 * count + at, mask=inside, other=0), mask=inside)
    heat = tl.load(packed + 6 * count + at, mask=inside, other=0).to(tl.int32)
    tl.store(heats + at, heat.to(tl.float32, bitcast=True), mask=inside)


class DecodeInputs:
    """Device tensors of a decode step for a fixed number of sequences; `unpack` fills them."""

    def __init__(self, count: int, device: torch.device) -> None:
        def ints() -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        self.packed = torch.zeros(FIELDS, count, dtype=torch.int64, device=device)
        self.token_ids, self.rows, self.positions, self.slots, self.next_positions = (ints() for _ in range(5))
        self.choices, self.seeds = ints(), ints()
        self.lengths = torch.ones(count, dtype=torch.int32, device=device)
        self.heats = torch.zeros(count, dtype=torch.float32, device=device)

    def unpack(self, last_tokens: torch.Tensor, tables: torch.Tensor, block_size: int) -> None:
        """last_tokens: [rows] int64. tables: [rows, most blocks] int32; gets each sequence's current block."""
        count = self.packed.shape[1]
        _unpack_kernel[(triton.cdiv(count, 128),)](
            self.packed, last_tokens, tables, self.token_ids, self.rows, self.positions, self.slots, self.lengths,
            self.next_positions, self.choices, self.seeds, self.heats, count, tables.stride(0),
            PAGE=block_size, BLOCK=128, num_warps=4,
        )  # fmt: skip
