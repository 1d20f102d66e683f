"""Content hashes of KV blocks. A block's hash covers its own tokens and, through its parent's hash, all tokens before.

The salt of a cache scope enters the chain before the first block that belongs to the scope alone, so no later block has
the same hash under another salt. Without a salt, timing reveals other clients' prompts (vLLM's CVE-2025-46570).
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from struct import Struct

from baton_common.cache_scope import UNSALTED, CacheScope

DIGEST_BYTES = 16
# The parent of the first block of every prompt.
ROOT_HASH = hashlib.blake2b(digest_size=DIGEST_BYTES).digest()

_KEY = Struct("<Q")


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block of tokens (ids below 2^32). parent: the hash of the block before it."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def salted(parent: bytes, salt: bytes) -> bytes:
    """Return the hash that replaces `parent` in the chain under this salt. The salt must not be empty."""
    return hashlib.blake2b(parent, key=salt, digest_size=DIGEST_BYTES).digest()


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    count: int,
    scope: CacheScope = UNSALTED,
    known: Sequence[bytes] = (),
) -> Iterator[bytes]:
    """Yield the hashes of the first `count` blocks of a prompt, each computed lazily.

    block_size: tokens. All of these blocks must be full. known: the hashes of the first blocks, which are not yielded.
    """
    first, end = len(known), count * block_size
    parent = known[-1] if known else ROOT_HASH
    return later_block_hashes(token_ids[first * block_size : end], block_size, first, parent, scope)


def later_block_hashes(
    token_ids: Sequence[int], block_size: int, first: int, parent: bytes, scope: CacheScope = UNSALTED
) -> Iterator[bytes]:
    """Yield the hashes of consecutive full blocks, each computed lazily.

    token_ids: the tokens of these blocks only. first: the index of the first block in its prompt. parent: the hash of
    the block before the first one; ROOT_HASH for block 0.
    """
    block_bytes = block_size * 4
    data = array("I", token_ids).tobytes()
    digest, own, blake2b = parent, scope.first_own_block(block_size), hashlib.blake2b
    for index, start in enumerate(range(0, len(data), block_bytes), first):
        if index == own:
            digest = salted(digest, scope.salt)
        digest = blake2b(digest + data[start : start + block_bytes], digest_size=DIGEST_BYTES).digest()
        yield digest


def block_key(digest: bytes) -> int:
    """Return the first 64 bits of a block's hash. Use it only where a rare collision costs time, never correctness."""
    key: int = _KEY.unpack_from(digest)[0]
    return key


def block_keys(token_ids: Sequence[int], block_size: int, scope: CacheScope = UNSALTED) -> Iterator[int]:
    """Return the keys of the blocks of a prompt that a prefix cache may hold, each computed lazily.

    block_size: tokens. The last token of a prompt is always computed, so a block that ends with it has no key here.
    """
    count = max(len(token_ids) - 1, 0) // block_size
    return map(block_key, block_hashes(token_ids, block_size, count, scope))
