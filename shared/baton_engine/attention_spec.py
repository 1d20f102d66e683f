"""How attention of a layer differs from softmax(q k * scale) v."""

from typing import Self

import msgspec


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The variant of attention that a layer needs.

    scale: factor of the scores. window: tokens that a query sees, its own included; None = all. chunked: tokens form
    chunks of `window` tokens, and a query sees those of its own chunk up to its own (Meta, Llama 4). The cache keeps
    what a window of that size would see, which includes them. softcap: scores become softcap * tanh(score / softcap)
    (Gemma 2); 0 = off. alibi: a slope for each query head; the scores lose slope * distance (Press et al., "Train
    Short, Test Long", 2022); None = off. rounded_alibi: they gain scale * slope * position of the key instead, rounded
    as rounded_alibi_reference does (Falcon). sinks: each query head has a learned score that takes part in the softmax
    and has no value (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025). The layer gives them to the backend in
    each call, as they are among its weights.
    """

    scale: float
    window: int | None = None
    chunked: bool = False
    softcap: float = 0.0
    alibi: tuple[float, ...] | None = None
    rounded_alibi: bool = False
    sinks: bool = False

    @property
    def reach(self) -> tuple[int, bool]:
        """Window, or 0, and whether it is a chunk: which keys a query sees."""
        return self.window or 0, self.chunked

    def part(self, heads: slice) -> Self:
        """Return the spec of some of the query heads."""
        return self if self.alibi is None else msgspec.structs.replace(self, alibi=self.alibi[heads])


class KeyBlockSpec(AttentionSpec, frozen=True, kw_only=True):
    """Grouped-query attention in which each key-value head selects the blocks of keys that its query heads attend to
    (MiniMax, MiniMax M3, 2026).

    selected_blocks: the most blocks that a query attends to. block_keys: consecutive tokens of such a block, which is
    independent of the blocks of the cache. local_blocks: the blocks that are always selected, at least 1: the query's
    own and those before it.
    """

    selected_blocks: int
    block_keys: int
    local_blocks: int

    @property
    def selected(self) -> int:
        """The most tokens that a query attends to."""
        return self.selected_blocks * self.block_keys
