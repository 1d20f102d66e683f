"""The scope within which requests share cached KV blocks."""

import msgspec

# BLAKE2b rejects keys longer than 64 bytes. A salt is a digest, which never needs more than 32.
MAX_SALT_BYTES = 32


class CacheScope(msgspec.Struct, frozen=True):
    """Requests share cached blocks only under equal salts.

    salt: at most MAX_SALT_BYTES; empty = the scope of all requests without a salt. shared_tokens: the prompt begins
    with this many public tokens, so blocks that lie wholly within them belong to the scope without a salt.
    """

    salt: bytes = b""
    shared_tokens: int = 0

    def first_own_block(self, block_size: int) -> int | None:
        """Return the index of the first block that only requests with this salt can find; None without a salt."""
        return self.shared_tokens // block_size if self.salt else None


UNSALTED = CacheScope()
