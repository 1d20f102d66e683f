"""The KV blocks of one engine: their references, their contents and the order in which they are allocated.

A block is held (references > 0), cached (no references, contents known by hash, reusable until evicted) or free.
"""

from collections import OrderedDict
from collections.abc import Callable

from baton_common.set_changes import SetChanges


class BlockPool:
    """Reference counts, prefix cache and least-recently-used eviction over `num_blocks` blocks.

    Each group of layers has its own hashes, since its blocks hold different KV of the same tokens. `changes` reports
    the first group's hashes only, which suffice to tell which prompts are cached. on_evict: called with the block, the
    group and the hash before a cached block is allocated again, so that its contents can still be read.
    """

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.on_evict: Callable[[int, int, bytes], None] | None = None
        self.references = [0] * num_blocks
        self._hash_of: dict[int, tuple[int, bytes]] = {}  # with the group
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.num_cached = 0
        self.changes: SetChanges[bytes] = SetChanges()  # hashes that entered or left the cache, until they are taken
        # Blocks without references, in the order of allocation: empty blocks first, then the least recently used.
        self._available: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._available)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._available)

    def find(self, digest: bytes, group: int = 0) -> int | None:
        """Return the block that is found under a hash, without holding it."""
        return self._block_of[group].get(digest)

    def match(self, hashes: list[bytes], group: int = 0) -> list[int]:
        """Return the blocks of the longest known prefix, without holding them."""
        blocks, block_of = [], self._block_of[group]
        for digest in hashes:
            block = block_of.get(digest)
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
        """Return `count` blocks of undefined content, and evict cached ones if necessary. The caller must have checked
        num_available."""
        blocks = []
        for _ in range(count):
            block, _ = self._available.popitem(last=False)
            entry = self._hash_of.pop(block, None)
            if entry is not None:
                group, digest = entry
                if self.on_evict is not None:
                    self.on_evict(block, group, digest)
                del self._block_of[group][digest]
                if group == 0:
                    self.changes.lose(digest)
                self.num_cached -= 1
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each block. The last blocks of a sequence are evicted before its first ones, as a cached
        block is only found through all blocks before it."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self._available[block] = None
                if block in self._hash_of:
                    self.num_cached += 1
                else:
                    self._available.move_to_end(block, last=False)

    def is_shared(self, block: int) -> bool:
        return self.references[block] > 1

    def remember(self, block: int, digest: bytes, group: int = 0) -> None:
        """Add a held block with complete contents to the prefix cache, unless another block has the same hash there."""
        if self.enable_prefix_caching and digest not in self._block_of[group] and block not in self._hash_of:
            self._block_of[group][digest] = block
            if group == 0:
                self.changes.gain(digest)
            self._hash_of[block] = group, digest

    def check_integrity(self, held: list[list[int]]) -> None:
        """Compare the reference counts with the block tables. Raises RuntimeError at the first difference.

        held: one list of blocks for each reference; blocks that forks share occur in one list only.
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
        for group, block_of in enumerate(self._block_of):
            for digest, block in block_of.items():
                if self._hash_of.get(block) != (group, digest):
                    raise RuntimeError(f"block {block} is found under a hash that it does not hold")
