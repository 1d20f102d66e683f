"""Prompts of random token ids."""

import random

from tests.models import VOCAB_SIZE

BLOCK_SIZE = 16


def make_prompt(length: int, seed: int) -> list[int]:
    """Return a prompt that shares no first token run with those of other seeds, but by chance."""
    return random.Random(f"{seed}/{length}").choices(range(VOCAB_SIZE), k=length)


def mixed_prompts(count: int, seed: int, longest: int = 200) -> list[list[int]]:
    """Return prompts of lengths from 1 token on."""
    lengths = random.Random(seed).choices(range(1, longest + 1), k=count)
    return [make_prompt(length, seed * 1_000 + index) for index, length in enumerate(lengths)]
