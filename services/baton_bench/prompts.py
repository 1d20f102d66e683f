"""The content of prompts, as token ids."""

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

LOWEST_TOKEN = 10  # lower ids are begin, end or padding tokens in most vocabularies


class PromptMaker:
    """Makes random prompts that depend on the seed and a name, and on nothing else.

    highest: the largest token id.
    """

    def __init__(self, seed: str, highest: int) -> None:
        self._seed = seed
        self._ids = list(range(min(LOWEST_TOKEN, highest), highest + 1))
        # A trace names most blocks a few times within a short while, and some very often.
        self._block = lru_cache(maxsize=4096)(self._make_block)

    def random(self, name: object, length: int) -> list[int]:
        return random.Random(f"{self._seed}/{name}").choices(self._ids, k=length)

    def of_blocks(self, blocks: Sequence[int], block_size: int, length: int) -> list[int]:
        """Return the first `length` tokens of these blocks; equal ids mean equal content."""
        return list(chain.from_iterable(self._block(block, block_size) for block in blocks))[:length]

    def _make_block(self, block: int, size: int) -> list[int]:
        return self.random(f"block {block}", size)
