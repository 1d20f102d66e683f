"""Which blocks a sequence has."""


class BlockTable:
    """The blocks of one sequence for one group of layers.

    blocks: the block at index i holds the tokens [i * block_size, (i + 1) * block_size). gone: how many of the first
    blocks have been given back, as no query sees their tokens any more; their entries are 0. whole_from: blocks before
    this index may lack tokens that no query of this sequence sees, so they must not enter the prefix cache.
    """

    __slots__ = ("blocks", "gone", "whole_from")

    def __init__(self, blocks: list[int], gone: int = 0, whole_from: int = 0) -> None:
        self.blocks = blocks
        self.gone = gone
        self.whole_from = whole_from

    def copy(self) -> "BlockTable":
        return BlockTable(self.blocks.copy(), self.gone, self.whole_from)

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence still has."""
        return self.blocks[self.gone :] if self.gone else self.blocks


class SharedBlocks:
    """The first `count` blocks of several sequences, in each group of layers that see all tokens.

    The sequences have one reference to each of these blocks together.
    """

    def __init__(self, count: int, holders: int) -> None:
        self.count = count
        self.holders = holders
