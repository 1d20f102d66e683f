"""The layout of a model's KV: what the cache holds for each token, and what a KV piece contains."""

import itertools
import math
from functools import cache

import msgspec

from .extent import Extent

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
# Each group of layers costs a block table for each sequence. With few layers of one kind and many of another, a model
# gets about this many groups at most, and its blocks have unused places instead.
_MOST_GROUPS = 8
# A block of a layer with a state has the inputs of its last tokens at places that depend on a token's position modulo
# a power of two, of which this is the largest.
STATE_PLACES = 8


class Plane(msgspec.Struct, array_like=True, frozen=True):
    """One kind of vectors in the cache, for example keys: `heads` of `dim` elements for each token and layer.

    A vector that all heads share, such as a latent vector, counts as one head.
    """

    name: str
    heads: int
    dim: int
    dtype: str  # as torch calls it

    @property
    def has_scales(self) -> bool:
        """Whether elements are codes: in each layer, a head has a scale that turns them into numbers."""
        return self.dtype == "float8_e4m3fn"

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one layer."""
        return self.dim * _ITEM_BYTES[self.dtype]

    def part(self, heads: slice) -> slice:
        """Return the part of a range of the layout's heads that this plane has. It may be empty."""
        return slice(min(heads.start, self.heads), min(heads.stop, self.heads))


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table. All of them see the same tokens.

    window: how many tokens a query sees, its own included; None = all. layers: in ascending order.
    """

    window: int | None
    layers: tuple[int, ...]

    def first_seen(self, position: int) -> int:
        """Return the first token that the query at a position sees."""
        return 0 if self.window is None else max(position + 1 - self.window, 0)

    def most_blocks(self, tokens: int, block_size: int, step_tokens: int) -> int:
        """Return the most blocks that a sequence of `tokens` tokens holds.

        step_tokens: the most of its tokens that one step computes.
        """
        blocks = -(-tokens // block_size)
        if self.window is None:
            return blocks
        # While a step is scheduled, the blocks of the step before it are still held. Neither has to begin at a block.
        return min(blocks, -(-(self.window + 2 * step_tokens) // block_size) + 1)


class Run(msgspec.Struct, frozen=True):
    """Consecutive layers that lie one after another in the blocks of one group.

    place: where the first of them lies in each block.
    """

    group: int
    place: int
    first_layer: int
    num_layers: int

    @property
    def end_layer(self) -> int:
        """The number after that of the last layer."""
        return self.first_layer + self.num_layers


class KvLayout(msgspec.Struct, array_like=True, frozen=True):
    """The planes that each layer of a model has, and how many tokens each layer sees.

    windows: of each layer, in tokens; empty = every layer sees all tokens.

    The layers form groups. A block holds some tokens of one group, and the blocks of all groups have one size, so that
    they come from one pool (the hybrid KV cache of vLLM works in the same way).

    A piece of KV holds layer after layer, of each layer plane after plane, and of each plane [tokens, heads, dim].

    heads: of each layer, the number of heads and then the elements of a head in each plane, if layers differ (Gemma 4);
    empty = as the planes have. The planes have room for the largest layer. A layer's heads divide a token's row of a
    plane evenly, and each uses the beginning of its part. So a range of a plane's heads is the same share of the heads
    of every layer.

    state_layers: layers with a recurrent state in place of keys and values, in ascending order. In such a layer a block
    holds the state after the last of its tokens that is computed, in the first `state_rows` of its rows. So a sequence
    needs the block of its last token, as with a window of two tokens. In a piece, a state counts as so many tokens:
    the rows of the state after token t have the numbers from t * state_rows on.

    stage_starts: the layers with which a stage of a pipeline may begin, in ascending order; empty = each layer.

    together: each so many consecutive tokens of a sequence, from its first one on, lie in one block.
    """

    num_layers: int
    planes: tuple[Plane, ...]
    windows: tuple[int | None, ...] = ()
    heads: tuple[tuple[int, ...], ...] = ()
    state_layers: tuple[int, ...] = ()
    state_rows: int = 0
    stage_starts: tuple[int, ...] = ()
    together: int = 1

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers. Those that see all tokens come first."""
        return _groups(self.windows or (None,) * self.num_layers)

    @property
    def depth(self) -> int:
        """The layers for which a block has room: as many as the largest group has."""
        return max(len(group.layers) for group in self.groups)

    @property
    def value_dims(self) -> dict[int, int]:
        """The elements of a head's value, by those of its key, for all kinds of layers with keys and values."""
        kinds = [dims for _, *dims in self.heads] or [[plane.dim for plane in self.planes]]
        # Planes after these two have something else.
        return {dims[0]: dims[:2][-1] for dims in kinds}

    @property
    def num_heads(self) -> int:
        """The heads of an extent: as many as the plane with the most heads has."""
        return max(plane.heads for plane in self.planes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self._layer_bytes(slice(0, self.num_heads))

    @property
    def slot_bytes(self) -> int:
        """Bytes that a block has for each of its tokens."""
        return self.depth * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers that have keys and values."""
        return (self.num_layers - len(self.state_layers)) * self.layer_bytes

    def size(self, extent: Extent) -> int:
        """Return the bytes of a piece."""
        return extent.num_layers * extent.num_tokens * self._layer_bytes(extent.heads)

    def holds(self, extent: Extent) -> bool:
        """Whether all layers and heads of an extent exist."""
        last_layer: int = extent.layers.stop
        last_head: int = extent.heads.stop
        return last_layer <= self.num_layers and last_head <= self.num_heads

    def extent(self, first_token: int, num_tokens: int, first_layer: int = 0, num_layers: int | None = None) -> Extent:
        """Return the extent of all heads of some tokens' KV, of all layers unless some are given."""
        return Extent(
            first_token=first_token,
            num_tokens=num_tokens,
            first_layer=first_layer,
            num_layers=self.num_layers if num_layers is None else num_layers,
            first_head=0,
            num_heads=self.num_heads,
        )

    def seen(self, first_token: int, num_tokens: int) -> list[Extent]:
        """Return the extents of the KV of a sequence's last tokens that later tokens need.

        For layers with a window, tokens that no later query sees are left out.
        """
        end = first_token + num_tokens
        whole = self.extent(first_token, num_tokens)
        return self.still_seen(whole, end) if num_tokens else []

    def still_seen(self, extent: Extent, position: int) -> list[Extent]:
        """Return the parts of an extent that the query at a position still sees.

        Neighbouring layers that see the same tokens are in one part.
        """
        parts = []
        layers = range(self.num_layers)[extent.layers]
        for (window, is_state), same in itertools.groupby(layers, self._kind):
            members = list(same)
            first = max(extent.first_token, LayerGroup(window, ()).first_seen(position))
            count = extent.tokens.stop - first
            if is_state:
                # Only the last token's state is read, so extents of earlier tokens have none.
                first = (position - 1) * self.state_rows
                count = self.state_rows if extent.tokens.stop == position else 0
            if count > 0:
                part = msgspec.structs.replace(
                    extent, first_token=first, num_tokens=count, first_layer=members[0], num_layers=len(members)
                )
                parts.append(part)
        return parts

    def places(self, extent: Extent, block_size: int) -> tuple[slice, slice]:
        """Return which entries of a block table have an extent of layers of one kind, and which rows it has in them,
        counted from the first row of the first of these blocks."""
        first, end = extent.tokens.start, extent.tokens.stop
        if extent.first_layer in self.state_layers:
            at = first // self.state_rows // block_size
            row = first % self.state_rows
            return slice(at, at + 1), slice(row, row + end - first)
        at = first // block_size
        return slice(at, -(-end // block_size)), slice(first - at * block_size, end - at * block_size)

    def block_size(self, tokens: int) -> int:
        """Return the size of blocks for which `tokens` were asked: the least multiple of it and of `together` that has
        room for a state, if there are states."""
        step = math.lcm(tokens, self.together)
        if not self.state_rows:
            return step
        step = math.lcm(step, STATE_PLACES)
        return -(-self.state_rows // step) * step

    def runs(self, layers: slice) -> list[Run]:
        """Return where the KV of consecutive layers lies."""
        places = _places(self.groups)
        runs: list[Run] = []
        for layer in range(self.num_layers)[layers]:
            group, place = places[layer]
            last = runs[-1] if runs else None
            if last is not None and (group, place) == (last.group, last.place + last.num_layers):
                runs[-1] = msgspec.structs.replace(last, num_layers=last.num_layers + 1)
            else:
                runs.append(Run(group, place, layer, 1))
        return runs

    def _kind(self, layer: int) -> tuple[int | None, bool]:
        return self.windows[layer] if self.windows else None, layer in self.state_layers

    def _layer_bytes(self, heads: slice) -> int:
        parts = ((plane.part(heads), plane.head_bytes) for plane in self.planes)
        return sum((part.stop - part.start) * head_bytes for part, head_bytes in parts)


@cache
def _groups(windows: tuple[int | None, ...]) -> tuple[LayerGroup, ...]:
    """Group layers by window. A group has as many layers as the rarest window; the last of a window may have fewer."""
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    size = max(min(map(len, by_window.values())), -(-len(windows) // _MOST_GROUPS))
    groups = [
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in by_window.items()
        for first in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.window is not None))


@cache
def _places(groups: tuple[LayerGroup, ...]) -> dict[int, tuple[int, int]]:
    """Return for each layer its group and its place in each block of the group."""
    return {
        layer: (index, place) for index, group in enumerate(groups) for place, layer in enumerate(group.layers)
    }  # fmt: skip
