"""What a model keeps of each token in its KV cache, and how much of it a piece on its way holds."""

import msgspec

from .extent import Extent

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class Plane(msgspec.Struct, array_like=True, frozen=True):
    """One kind of vectors in the cache, for example keys: `heads` of `dim` elements for each token and layer.

    What all heads share, such as a latent vector, counts as one head.
    """

    name: str
    heads: int
    dim: int
    dtype: str  # as torch calls it

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one layer."""
        return self.dim * _ITEM_BYTES[self.dtype]

    def part(self, heads: slice) -> slice:
        """Return which of this plane's heads are among those of the layout; maybe none."""
        return slice(min(heads.start, self.heads), min(heads.stop, self.heads))


class KvLayout(msgspec.Struct, array_like=True, frozen=True):
    """The planes that each layer of a model has.

    A piece of KV holds layer after layer, of each layer plane after plane, and of each plane [tokens, heads, dim].
    """

    num_layers: int
    planes: tuple[Plane, ...]

    @property
    def num_heads(self) -> int:
        """Heads that extents count: as many as the plane with the most has."""
        return max(plane.heads for plane in self.planes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self._layer_bytes(slice(0, self.num_heads))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.layer_bytes

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

    def _layer_bytes(self, heads: slice) -> int:
        parts = ((plane.part(heads), plane.head_bytes) for plane in self.planes)
        return sum((part.stop - part.start) * head_bytes for part, head_bytes in parts)
