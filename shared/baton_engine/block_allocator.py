"""Gives sequences their blocks in each group of layers, and takes back the blocks whose tokens no query sees."""

import math
from collections import Counter
from collections.abc import Iterator

from baton_common.kv_layout import LayerGroup

from .block_pool import BlockPool
from .block_tables import BlockTable, SharedBlocks
from .sequence import Sequence


class BlockAllocator:
    """The block tables of sequences over one pool.

    A group of layers that see all tokens has blocks for all known tokens of a sequence from its admission on. A group
    with a window has blocks for the window and for the steps under way: its oldest blocks go back to the pool as soon
    as they are computed and no later query sees them.
    """

    def __init__(self, pool: BlockPool, groups: tuple[LayerGroup, ...], block_size: int, step_tokens: int) -> None:
        """step_tokens: the most tokens of one sequence that a step computes."""
        self.pool = pool
        self.num_groups = len(groups)
        self.windowed = any(group.window is not None for group in groups)
        # By how many tokens a long sequence grows until it needs one more block of any group. Groups with a window give
        # back as many blocks as they take.
        growing = sum(group.window is None for group in groups)
        self.block_tokens = block_size / growing if growing else math.inf
        self.export_blocks = 0  # held by exports, those that still run included
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._groups = groups
        self._size = block_size
        self._step_tokens = step_tokens
        # Blocks that must be cached before the first token to compute, so that its query finds all keys that it sees.
        windows = [group.window for group in groups if group.window is not None]
        self._seen_blocks = -(-(max(windows, default=1) - 1) // block_size)

    def most_blocks(self, tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens holds at most."""
        return sum(group.most_blocks(tokens, self._size, self._step_tokens) for group in self._groups)

    def take(self, sequence: Sequence, margin: int) -> bool:
        """Give a sequence blocks for its known tokens, with those that the prefix cache has.

        Returns False, with nothing changed, if too few blocks are left.

        margin: blocks that must stay available for other sequences. They may be taken if no other sequence runs.
        """
        pool, size, known = self.pool, self._size, sequence.known
        hashes = self._known_prefix(sequence)
        imports, cached = sequence.imports, len(hashes)
        tables, missing = [], []
        for index, group in enumerate(self._groups):
            # A source brings only tokens that the first query here sees, so the oldest block may lack its first tokens.
            seen = group.first_seen(max(sequence.import_end, cached * size))
            first, whole_from = seen // size, -(-seen // size) if imports else 0
            found = [pool.find(digest, index) for digest in hashes[first:]]
            table = BlockTable([0] * first + [block for block in found if block is not None], first, whole_from)
            pool.hold(table.held)
            tables.append(table)
            missing.append(group.most_blocks(known - len(table.blocks) * size, size, self._step_tokens))
        needed = sum(missing)
        if needed + margin > pool.num_available and (margin or needed > pool.num_available):
            for table in tables:
                pool.release(table.held)
            return False
        self.prefix_queries += known
        self.prefix_hits += cached * size
        for table, count in zip(tables, missing, strict=True):
            table.blocks += pool.allocate(count)
        sequence.tables, sequence.settled, sequence.cached = tables, cached, cached * size
        if sequence.exports:
            self.export_blocks += sequence.num_blocks
        return True

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many of a sequence's first tokens the prefix cache has now."""
        return len(self._known_prefix(sequence)) * self._size

    def _known_prefix(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the longest prefix whose blocks the cache has, as far as a later query sees them."""
        reads_cache = sequence.imports or not sequence.needs_prompt_logits
        if not (self.pool.enable_prefix_caching and reads_cache):
            return []
        # The last token is always computed: its logits choose the next one.
        hashes = sequence.hashes(0, (sequence.known - 1) // self._size)
        windowed = []
        for index, group in enumerate(self._groups):
            if group.window is None:
                hashes = hashes[: len(self.pool.match(hashes, index))]
            else:
                windowed.append(index)
        if not windowed:
            return hashes
        end = at = len(hashes)
        while at and end - at < self._seen_blocks:
            at -= 1
            if any(self.pool.find(hashes[at], index) is None for index in windowed):
                end = at
        return hashes[:end]

    def lacking(self, sequence: Sequence) -> list[int]:
        """Return the groups in which a sequence's next token has no block, or only a block shared with others."""
        at = sequence.computed // self._size
        return [
            group
            for group, table in enumerate(sequence.tables)
            if at == len(table.blocks) or self.pool.is_shared(table.blocks[at])
        ]

    def grow(self, sequence: Sequence, groups: list[int]) -> tuple[list[tuple[int, int]], list["NewBlock"]]:
        """Give a sequence the blocks that it is lacking. The caller has made sure that they are available.

        Returns the blocks to copy, (from, to), and the new entries of the block tables.
        """
        at = sequence.computed // self._size
        copies, news = [], []
        for group, block in zip(groups, self.pool.allocate(len(groups)), strict=True):
            table = sequence.tables[group].blocks
            if at < len(table):
                copies.append((table[at], block))
                self.pool.release([table[at]])
                table[at] = block
            else:
                table.append(block)
            news.append((sequence.row, group, at, block))
        return copies, news

    def extend(self, sequence: Sequence, end: int) -> tuple[int, list["NewBlock"]]:
        """Give a prompt blocks up to token `end` as far as they are available.

        Returns the token up to which it has blocks, and the new entries of the block tables.
        """
        size, news = self._size, []
        tables = [table.blocks for table in sequence.tables]
        first = min(map(len, tables))
        for at in range(first, -(-end // size)):
            groups = [group for group, table in enumerate(tables) if len(table) == at]
            # Either all groups get a block or none does: a token needs a block in every group.
            if len(groups) > self.pool.num_available:
                break
            for group, block in zip(groups, self.pool.allocate(len(groups)), strict=True):
                tables[group].append(block)
                news.append((sequence.row, group, at, block))
        if sequence.exports:
            self.export_blocks += len(news)
        return min(map(len, tables)) * size, news

    def settle(self, sequence: Sequence, end: int) -> None:
        """Note that the KV of a sequence's first `end` tokens is computed and finite.

        Complete blocks enter the prefix cache, and blocks that no query from `end` on sees go back to the pool.
        """
        size, end = self._size, min(end, sequence.computed, sequence.known)
        first, full = sequence.settled, end // size
        if full <= first:
            return
        hashes = sequence.hashes(first, full) if self.pool.enable_prefix_caching else []
        for index, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            for at, digest in enumerate(hashes, first):
                if at >= table.gone and at >= table.whole_from:
                    self.pool.remember(table.blocks[at], digest, index)
            unseen = group.first_seen(end) // size
            if unseen > table.gone:
                gone = slice(table.gone, unseen)
                self.pool.release(table.blocks[gone])
                if sequence.exports:
                    self.export_blocks -= unseen - table.gone
                table.blocks[gone] = [0] * (unseen - table.gone)
                table.gone = unseen
        sequence.settled = full

    def share(self, sequence: Sequence, others: list[Sequence]) -> None:
        """Give a sequence's blocks to those that fork from it.

        In groups that see all tokens they hold the full blocks together, with one reference.
        """
        if not sequence.tables or not others:
            return
        full = sequence.computed // self._size
        shared = SharedBlocks(full, 1 + len(others))
        for choice in (sequence, *others):
            choice.shared = shared
        for choice in others:
            choice.tables = [table.copy() for table in sequence.tables]
            for group, table in zip(self._groups, choice.tables, strict=True):
                self.pool.hold(table.blocks[full:] if group.window is None else table.held)

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back."""
        shared, together = sequence.shared, 0
        if shared is not None:
            shared.holders -= 1
            together = shared.count if shared.holders else 0
        if sequence.exports:
            self.export_blocks -= sequence.num_blocks
        for blocks in self._own(sequence, together):
            self.pool.release(blocks)
        sequence.tables, sequence.shared, sequence.settled = [], None, 0

    def _own(self, sequence: Sequence, together: int) -> Iterator[list[int]]:
        """Yield the blocks of which a sequence has a reference of its own, when it has the first `together` of each
        group that sees all tokens with others."""
        for group, table in zip(self._groups, sequence.tables, strict=False):
            yield table.blocks[together:] if group.window is None else table.held

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Compare the pool's counts with all block tables. Raises RuntimeError on the first difference."""
        held: list[list[int]] = []
        holders: Counter[SharedBlocks] = Counter()
        for sequence in sequences:
            shared = sequence.shared
            if shared is None:
                held += self._own(sequence, 0)
                continue
            # Blocks that several sequences share are counted with the first of these only.
            held += self._own(sequence, shared.count if holders[shared] else 0)
            holders[shared] += 1
        if any(shared.holders != count for shared, count in holders.items()):
            raise RuntimeError("a count of the sequences that hold blocks together is wrong")
        self.pool.check_integrity(held)
        if self.export_blocks != sum(sequence.num_blocks for sequence in sequences if sequence.exports):
            raise RuntimeError("the allocator has lost count of the blocks of exports")


# (row, group of layers, index, block)
NewBlock = tuple[int, int, int, int]
