"""Layers of any number of blocks, one of which needs the cache."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

from baton_engine.context import Context

from .llama import LlamaLayer

AnyBlock = TypeVar("AnyBlock")


class BlockLayer(LlamaLayer):
    """A layer of blocks with a norm before each. parts: the norm and the block, and whether it needs the cache."""

    parts: list[tuple[Any, Callable[..., torch.Tensor], bool]]

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for norm, part, caches in self.parts:
            normed, residual = norm.add(x, residual)
            x = part(normed, ctx) if caches else part(normed)
        assert residual is not None
        return x, residual


def by_cache(blocks: Sequence[AnyBlock], caches: Callable[[AnyBlock], bool]) -> tuple[tuple[AnyBlock, ...], ...]:
    """Return the blocks of each layer of the engine: one that needs the cache and all that follow it up to the next.

    Those before the first such block belong to the first layer. caches: whether a block needs the cache.
    """
    starts = [index for index, block in enumerate(blocks) if caches(block)]
    bounds = [0, *starts[1:], len(blocks)] if starts else []
    return tuple(tuple(blocks[first:end]) for first, end in pairwise(bounds))
