"""KV blocks out of the paged cache into one contiguous buffer, and back, with a checksum on the way.

The checksum of a block's words w (32 bits each, at index i of the buffer) is the sum of w * (2 * i + 1) modulo 2^32:
every bit flip, and every exchange of two different words, changes it, and programs can add their parts in any order.
"""

import torch
import triton
import triton.language as tl

_WORDS = 4096
_MASK = 0xFFFFFFFF


def gather_blocks_reference(cache: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """cache: [layers, 2, blocks, block_size, kv_heads, head_dim]. blocks: [n] int64. out: cache's shape with n blocks,
    written. Returns the checksum of out, [1] int64."""
    torch.index_select(cache, 2, blocks, out=out)
    return checksum_reference(out)


def scatter_blocks_reference(cache: torch.Tensor, blocks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write values, shaped as gather_blocks gives them, into blocks of the cache. Returns the checksum, [1] int64."""
    cache.index_copy_(2, blocks, values)
    return checksum_reference(values)


def checksum_reference(values: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a contiguous tensor whose bytes are a multiple of four, [1] int64."""
    words = values.reshape(-1).view(torch.int32).long()
    odd = 2 * torch.arange(len(words), device=words.device) + 1
    # int64 products and sums wrap around, and their low 32 bits are still right.
    return ((words * odd).sum() & _MASK).view(1)


@triton.jit
def _move_kernel(
    cache, blocks, packed, checksum, words_per_block, cache_blocks, num_blocks,
    OUT: tl.constexpr, CHECK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    plane, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tl.load(blocks + index)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = word < words_per_block
    cache_at = (plane * cache_blocks + block) * words_per_block + word
    packed_at = (plane * num_blocks + index) * words_per_block + word
    if OUT:
        values = tl.load(cache + cache_at, mask=inside, other=0)
        tl.store(packed + packed_at, values, mask=inside)
    else:
        values = tl.load(packed + packed_at, mask=inside, other=0)
        tl.store(cache + cache_at, values, mask=inside)
    if CHECK:
        product = values.to(tl.int64) * (2 * packed_at + 1)
        tl.atomic_add(checksum, tl.sum(tl.where(inside, product & 0xFFFFFFFF, 0)))


def _move(cache: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor, out: bool, check: bool) -> torch.Tensor:
    planes = cache.shape[0] * cache.shape[1]
    words = cache[0, 0, 0].numel() * cache.element_size() // 4
    checksum = torch.zeros(1, dtype=torch.int64, device=cache.device)
    _move_kernel[(planes, len(blocks), triton.cdiv(words, _WORDS))](
        cache.view(torch.int32), blocks, packed.view(torch.int32), checksum, words, cache.shape[2], len(blocks),
        OUT=out, CHECK=check, WORDS=_WORDS, num_warps=8,
    )  # fmt: skip
    return checksum & _MASK


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, out: torch.Tensor, check: bool = True) -> torch.Tensor:
    """As gather_blocks_reference; without `check` the checksum is 0. Both tensors are contiguous."""
    return _move(cache, blocks, out, out=True, check=check)


def scatter_blocks(cache: torch.Tensor, blocks: torch.Tensor, values: torch.Tensor, check: bool = True) -> torch.Tensor:
    """As scatter_blocks_reference; without `check` the checksum is 0. Both tensors are contiguous."""
    return _move(cache, blocks, values, out=False, check=check)
