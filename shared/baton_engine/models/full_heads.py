"""The config of models whose layers without a window have other key-value heads than those with one."""

from typing import Any, Self

import msgspec

from baton_engine.config import ConfigError
from baton_engine.shard import Place, head_part

from .heads_by_layer import WithHeadsByLayer


class WithFullHeads(WithHeadsByLayer):
    """A part of the config of such a model.

    num_kv_heads: of layers with a window. full_kv_heads: of the others, a divisor of num_kv_heads.
    """

    num_kv_heads: int
    full_kv_heads: int

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.num_kv_heads % self.full_kv_heads:
            raise ConfigError(
                f"{self.full_kv_heads} key-value heads of layers that see all tokens do not divide the "
                f"{self.num_kv_heads} of layers with a window"
            )

    def part(self, ranks: Place) -> Self:
        if ranks.count > self.full_kv_heads != self.num_kv_heads:
            # A head of the cache would be on two ranks in layers of one kind and on one rank in those of the other.
            raise ConfigError(
                f"--tensor-parallel {ranks.count} is more than the {self.full_kv_heads} key-value heads of layers that "
                "see all tokens"
            )
        heads = head_part(self.full_kv_heads, ranks, "key-value heads")
        whole: Any = self
        fewer = msgspec.structs.replace(whole, full_kv_heads=heads.stop - heads.start)
        part: Self = super(WithFullHeads, fewer).part(ranks)  # type: ignore[misc]
        return part
