"""KV of some tokens, layers and heads out of the paged cache into one contiguous buffer, and back, with a checksum on
the way, as reference/blocks.py defines it."""

import torch
import triton
import triton.language as tl

_WORDS = 4096  # that a program moves
_WIDEST = 1024
_MASK = 0xFFFFFFFF


# One compiled kernel serves all pieces: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["first_token", "num_tokens", "first_plane"])
def _move_kernel(
    cache, table, packed, checksum, first_token, num_tokens, first_plane, cache_blocks,
    cache_words, first_word, words,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHECK: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)[None, :]
    inside = (token < num_tokens) & (word < words)
    position = first_token + token
    block = tl.load(table + position // SIZE, mask=token < num_tokens, other=0)
    row = ((first_plane + plane) * cache_blocks + block) * SIZE + position % SIZE
    cache_at = row * cache_words + first_word + word
    packed_at = (plane * num_tokens + token) * words + word
    if OUT:
        values = tl.load(cache + cache_at, mask=inside, other=0)
        tl.store(packed + packed_at, values, mask=inside)
    else:
        values = tl.load(packed + packed_at, mask=inside, other=0)
        tl.store(cache + cache_at, values, mask=inside)
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
    """As checksum_reference."""
    words = values.numel() * values.element_size() // 4
    result = _zero(values)
    _checksum_kernel[(triton.cdiv(words, _WORDS),)](values.view(torch.int32), result, words, WORDS=_WORDS, num_warps=8)
    return result & _MASK


def _move(
    cache: torch.Tensor, table: torch.Tensor, first_token: int, layers: slice, heads: slice, packed: torch.Tensor,
    out: bool, check: bool,
) -> torch.Tensor:  # fmt: skip
    _, planes, num_blocks, size, num_heads, head_dim = cache.shape
    head_words = head_dim * cache.element_size() // 4
    words, tokens = (heads.stop - heads.start) * head_words, packed.shape[2]
    width = min(triton.next_power_of_2(words), _WIDEST)
    height = _WORDS // width
    checksum = _zero(cache)
    grid = (planes * (layers.stop - layers.start), triton.cdiv(tokens, height), triton.cdiv(words, width))
    _move_kernel[grid](
        cache.view(torch.int32), table, packed.view(torch.int32), checksum, first_token, tokens, planes * layers.start,
        num_blocks, num_heads * head_words, heads.start * head_words, words,
        SIZE=size, OUT=out, CHECK=check, TOKENS=height, WORDS=width, num_warps=8,
    )  # fmt: skip
    return checksum & _MASK


def gather_kv(
    cache: torch.Tensor, table: torch.Tensor, first_token: int, layers: slice, heads: slice, out: torch.Tensor,
    check: bool = True,
) -> torch.Tensor:  # fmt: skip
    """As gather_kv_reference. Cache and out are contiguous."""
    return _move(cache, table, first_token, layers, heads, out, out=True, check=check)


def scatter_kv(
    cache: torch.Tensor, table: torch.Tensor, first_token: int, layers: slice, heads: slice, values: torch.Tensor,
    check: bool = True,
) -> torch.Tensor:  # fmt: skip
    """As scatter_kv_reference. Cache and values are contiguous."""
    return _move(cache, table, first_token, layers, heads, values, out=False, check=check)
