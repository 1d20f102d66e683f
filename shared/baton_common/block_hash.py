"""Names of KV blocks by content: a block's hash covers its own tokens and, through its parent, all tokens before."""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_hash(salt: str = "") -> bytes:
    """Return the parent of every first block. Contents under different salts (model, adapter, tenant) never match."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block of tokens (ids below 2^32) that follows the block named parent."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
