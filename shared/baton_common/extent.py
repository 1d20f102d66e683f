"""A rectangular part of a prompt's KV: a range of layers, of tokens and of heads."""

import math
from collections.abc import Iterable, Iterator

import msgspec

_Range = tuple[int, int]  # from, to (exclusive)
_Box = tuple[_Range, _Range, _Range]


class Extent(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Consecutive layers, tokens and KV heads. Indices count from the first one of the model, or of the prompt."""

    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.num_tokens)

    @property
    def layers(self) -> slice:
        return slice(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> slice:
        return slice(self.first_head, self.first_head + self.num_heads)

    def box(self) -> _Box:
        return tuple((part.start, part.stop) for part in (self.tokens, self.layers, self.heads))  # type: ignore[return-value]


class Missing:
    """The parts of some extents that have not arrived. They arrive in any order and size, and each only once."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        """extents: they do not overlap."""
        # These boxes never overlap. There is one per extent while parts arrive in order with all layers and heads.
        self._boxes = [extent.box() for extent in extents if _volume(extent.box())]

    def __bool__(self) -> bool:
        return bool(self._boxes)

    @property
    def num_parts(self) -> int:
        """The number of boxes; `lacks` and `remove` take time in proportion to it."""
        return len(self._boxes)

    def lacks(self, part: Extent) -> bool:
        """Whether a part is not empty and all of it is missing."""
        wanted = part.box()
        found = sum(_volume(_overlap(box, wanted)) for box in self._boxes)
        return 0 < _volume(wanted) == found

    def remove(self, part: Extent) -> None:
        """Record that a part has arrived."""
        self._boxes = [rest for box in self._boxes for rest in _without(box, part.box())]


def _volume(box: _Box) -> int:
    return math.prod(max(end - start, 0) for start, end in box)


def _overlap(box: _Box, other: _Box) -> _Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))  # type: ignore[return-value]


def _without(box: _Box, cut: _Box) -> Iterator[_Box]:
    """Yield boxes that together cover the part of `box` outside of `cut`."""
    inner = _overlap(box, cut)
    if not _volume(inner):
        yield box
        return
    rest = list(box)
    for axis, (start, end) in enumerate(inner):
        below, above = (rest[axis][0], start), (end, rest[axis][1])
        for side in (below, above):
            if side[0] < side[1]:
                yield (*rest[:axis], side, *rest[axis + 1 :])  # type: ignore[misc]
        rest[axis] = (start, end)
