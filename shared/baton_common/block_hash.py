"""Names of KV blocks by content: a block's hash covers its own tokens and, through its parent, all tokens before."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from struct import Struct

DIGEST_BYTES = 16

_KEY = Struct("<Q")


def root_hash(salt: str = "") -> bytes:
    """Return the parent of every first block. Contents under different salts (model, adapter, tenant) never match."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block of tokens (ids below 2^32) that follows the block named parent."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def block_key(digest: bytes) -> int:
    """Return the 64 bits of a block's hash that stand for it where a rare mix-up only costs time."""
    key: int = _KEY.unpack_from(digest)[0]
    return key


def block_keys(token_ids: Sequence[int], block_size: int) -> Iterator[int]:
    """Yield the keys of the blocks of a prompt that a prefix cache may have, computing each when it is asked for.

    block_size: tokens. The last token of a prompt is always computed, so the block that it ends is not among them.
    """
    data = array("I", token_ids).tobytes()
    width = block_size * 4
    digest, blake2b, key_of = root_hash(), hashlib.blake2b, _KEY.unpack_from
    for start in range(0, (len(token_ids) - 1) // block_size * width, width):
        digest = blake2b(digest + data[start : start + width], digest_size=DIGEST_BYTES).digest()
        yield key_of(digest)[0]
