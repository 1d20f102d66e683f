"""Copies KV of some tokens, layers and heads between the paged cache and one contiguous buffer, and computes its
checksum on the way. reference/blocks.py defines the order of the buffer and the checksum."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORDS = 4096  # words of 32 bits that one program moves
_WIDEST = 1024  # most words of one token in a program's tile
_MASK = 0xFFFFFFFF


# One compiled kernel serves all pieces: compilation would halt a service for half a second.
@triton.jit(
    do_not_specialize=["first_token", "num_tokens", "first_layer", "layer_words", "first_packed", "plane_blocks"]
)
def _move_kernel(
    plane, table, packed, checksum, first_token, num_tokens, first_layer, layer_words, first_packed, plane_blocks,
    token_words, first_word, words,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHECK: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)[None, :]
    inside = (token < num_tokens) & (word < words)
    position = first_token + token
    block = tl.load(table + position // SIZE, mask=token < num_tokens, other=0)
    row = ((first_layer + layer) * plane_blocks + block) * SIZE + position % SIZE
    plane_at = row * token_words + first_word + word
    packed_at = layer * layer_words + first_packed + token.to(tl.int64) * words + word
    if OUT:
        values = tl.load(plane + plane_at, mask=inside, other=0)
        tl.store(packed + packed_at, values, mask=inside)
    else:
        values = tl.load(packed + packed_at, mask=inside, other=0)
        tl.store(plane + plane_at, values, mask=inside)
    if CHECK:
        product = values.to(tl.int64) * (2 * packed_at + 1)
        tl.atomic_add(checksum, tl.sum(tl.where(inside, product & 0xFFFFFFFF, 0)))


@triton.jit(do_not_specialize=["words"])
def _checksum_kernel(packed, checksum, words, WORDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    values = tl.load(packed + at, mask=at < words, other=0)
    tl.atomic_add(checksum, tl.sum(values.to(tl.int64) * (2 * at + 1) & 0xFFFFFFFF))


def _zero(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=like.device)


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Compute checksum_reference."""
    words = values.numel() * values.element_size() // 4
    result = _zero(values)
    _checksum_kernel[(triton.cdiv(words, _WORDS),)](values.view(torch.int32), result, words, WORDS=_WORDS, num_warps=8)
    return result & _MASK


def _move(
    planes: Sequence[torch.Tensor], table: torch.Tensor, tokens: slice, layers: slice, heads: slice,
    packed: torch.Tensor, out: bool, check: bool,
) -> torch.Tensor:  # fmt: skip
    checksum, count = _zero(packed), tokens.stop - tokens.start
    head_words = [plane.shape[4] * plane.element_size() // 4 for plane in planes]
    parts = [slice(min(heads.start, plane.shape[3]), min(heads.stop, plane.shape[3])) for plane in planes]
    words = [(part.stop - part.start) * size for part, size in zip(parts, head_words, strict=True)]
    first_packed = 0
    for plane, part, size, moved in zip(planes, parts, head_words, words, strict=True):
        if not moved:
            continue
        _, num_blocks, block_size, num_heads, _ = plane.shape
        width = min(triton.next_power_of_2(moved), _WIDEST)
        height = _WORDS // width
        grid = (layers.stop - layers.start, triton.cdiv(count, height), triton.cdiv(moved, width))
        _move_kernel[grid](
            plane.view(torch.int32), table, packed.view(torch.int32), checksum, tokens.start, count, layers.start,
            count * sum(words), first_packed, num_blocks, num_heads * size, part.start * size, moved,
            SIZE=block_size, OUT=out, CHECK=check, TOKENS=height, WORDS=width, num_warps=8,
        )  # fmt: skip
        first_packed += count * moved
    return checksum & _MASK if check else checksum


def gather_kv(
    planes: Sequence[torch.Tensor], table: torch.Tensor, tokens: slice, layers: slice, heads: slice,
    out: torch.Tensor, check: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Compute gather_kv_reference. Planes and out must be contiguous, the bytes of a head a multiple of four."""
    return _move(planes, table, tokens, layers, heads, out, out=True, check=check)


def scatter_kv(
    planes: Sequence[torch.Tensor], table: torch.Tensor, tokens: slice, layers: slice, heads: slice,
    values: torch.Tensor, check: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Compute scatter_kv_reference. Planes and values must be contiguous, the bytes of a head a multiple of four."""
    return _move(planes, table, tokens, layers, heads, values, out=False, check=check)
