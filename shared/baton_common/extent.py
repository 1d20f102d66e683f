"""Which part of a prompt's KV something is: some layers, tokens and heads of it."""

import math
from collections.abc import Iterable, Iterator

import msgspec

_Range = tuple[int, int]  # from, to (exclusive)
_Box = tuple[_Range, _Range, _Range]


class Extent(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Consecutive layers, tokens and KV heads; all are numbered from the model's, or prompt's, first."""

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
    """The parts of some extents that have not arrived. Parts may arrive in any order and any sizes, each but once."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        """extents: they do not overlap."""
        # Boxes that do not overlap. One for each extent, as long as parts come in order with all layers and heads.
        self._boxes = [extent.box() for extent in extents if _volume(extent.box())]

    def __bool__(self) -> bool:
        return bool(self._boxes)

    @property
    def num_parts(self) -> int:
        """In how many boxes it is held, which is what `lacks` and `remove` take time for."""
        return len(self._boxes)

    def lacks(self, part: Extent) -> bool:
        """Whether all of a part, which is not empty, is missing."""
        wanted = part.box()
        found = sum(_volume(_overlap(box, wanted)) for box in self._boxes)
        return 0 < _volume(wanted) == found

    def remove(self, part: Extent) -> None:
        """Note that a part has come."""
        self._boxes = [rest for box in self._boxes for rest in _without(box, part.box())]


def _volume(box: _Box) -> int:
    return math.prod(max(end - start, 0) for start, end in box)


def _overlap(box: _Box, other: _Box) -> _Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))  # type: ignore[return-value]


def _without(box: _Box, cut: _Box) -> Iterator[_Box]:
    """Yield boxes that together are what of `box` lies outside of `cut`."""
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
