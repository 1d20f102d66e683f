"""The KV blocks of one engine: who holds them, what they hold, and which to give out next.

A block is held (references > 0), cached (no references, contents known by hash, reusable until evicted) or free.
"""

from collections import OrderedDict

from baton_common.set_changes import SetChanges


class SharedBlocks:
    """The first `count` blocks of several sequences, which have one reference to each of them together."""

    def __init__(self, count: int, holders: int) -> None:
        self.count = count
        self.holders = holders


class BlockPool:
    """Reference counts, prefix cache and least-recently-used eviction over `num_blocks` blocks."""

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.num_cached = 0
        self.changes: SetChanges[bytes] = SetChanges()  # of the hashes that are found, until somebody takes them
        # In the order in which they will be given out: empty ones first, then the least recently used.
        self._available: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._available)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._available)

    def match(self, hashes: list[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix, without holding them."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: list[int]) -> None:
        """Add a reference to each block; cached ones leave the eviction order."""
        for block in blocks:
            if self.references[block] == 0:
                del self._available[block]
                self.num_cached -= block in self._hash_of
            self.references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks of undefined content, evicting cached ones if need be; the caller checks the number."""
        blocks = []
        for _ in range(count):
            block, _ = self._available.popitem(last=False)
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
                self.changes.lose(digest)
                self.num_cached -= 1
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each block. The tail of a sequence is given out again before its head."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self._available[block] = None
                if block in self._hash_of:
                    self.num_cached += 1
                else:
                    self._available.move_to_end(block, last=False)

    def release_all(self, blocks: list[int], shared: SharedBlocks | None) -> None:
        """Drop a sequence's references to its blocks, of which it may hold the first together with others."""
        if shared is not None:
            shared.holders -= 1
            if shared.holders:
                blocks = blocks[shared.count :]
        self.release(blocks)

    def is_shared(self, block: int) -> bool:
        return self.references[block] > 1

    def remember(self, block: int, digest: bytes) -> None:
        """Let a held block whose contents are complete be found under its hash. The first block of a hash keeps it."""
        if self.enable_prefix_caching and digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self.changes.gain(digest)
            self._hash_of[block] = digest

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        for block, digest in self._hash_of.items():
            self.changes.lose(digest)
            if self.references[block] == 0:
                self._available.move_to_end(block, last=False)
        self.num_cached = 0
        self._hash_of.clear()
        self._block_of.clear()

    def check_integrity(self, held: list[list[int]]) -> None:
        """Compare the reference counts with the tables that exist. Raises RuntimeError at the first difference.

        held: what has a reference of its own; blocks that are held together are in it once.
        """
        counts = [0] * self.num_blocks
        for table in held:
            for block in table:
                counts[block] += 1
        for block, count in enumerate(counts):
            if self.references[block] != count:
                raise RuntimeError(f"block {block} has {self.references[block]} references, {count} tables hold it")
            if (count == 0) != (block in self._available):
                raise RuntimeError(f"block {block} has {count} references and is on the wrong list")
        for digest, block in self._block_of.items():
            if self._hash_of.get(block) != digest:
                raise RuntimeError(f"block {block} is found under a hash that it does not hold")
