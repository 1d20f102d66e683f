"""The memory behind the block pool: what each layer keeps of each token, by block."""

import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout

from .ops import Ops
from .transfer import to_device

# Bounds what copies of blocks hold for a moment.
_COPY_BYTES = 64 << 20


class KvCache:
    """A tensor [layers, blocks, block_size, heads, dim] for each plane of a layout. It begins without blocks."""

    def __init__(self, layout: KvLayout, block_size: int, device: torch.device, ops: Ops) -> None:
        self.layout = layout
        self.device = device
        self._block_size = block_size
        self._ops = ops
        self.allocate(0)

    def allocate(self, num_blocks: int) -> None:
        """Have so many blocks, of zeros, in place of those there were. The caller asks for `layer` anew."""
        self.num_blocks = num_blocks
        # The old ones go first: there may be no room for both.
        self.planes: list[torch.Tensor] = []
        self._layers: list[tuple[torch.Tensor, ...]] = []
        for plane in self.layout.planes:
            shape = self.layout.num_layers, num_blocks, self._block_size, plane.heads, plane.dim
            self.planes.append(torch.zeros(shape, dtype=getattr(torch, plane.dtype), device=self.device))
        self._layers = list(zip(*self.planes, strict=True))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layout.token_bytes * self._block_size

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the planes of a layer, [blocks, block_size, heads, dim] each."""
        return self._layers[layer]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in all layers, one after another."""
        most = max(_COPY_BYTES // self.block_bytes, 1)
        for first in range(0, len(pairs), most):
            sources, targets = zip(*pairs[first : first + most], strict=True)
            for plane in self.planes:
                plane[:, list(targets)] = plane[:, list(sources)]

    def gather(self, blocks: list[int], extent: Extent, out: torch.Tensor, check: bool = False) -> torch.Tensor:
        """Write part of a block table's KV into out, contiguous uint8 of as many bytes as the layout says.

        Both are on one device. Returns, with `check`, out's `checksum`.
        """
        return self._move(True, blocks, extent, out, check)

    def scatter(self, blocks: list[int], extent: Extent, values: torch.Tensor) -> None:
        """Fill part of a block table from values, as `gather` writes them, on any device."""
        self._move(False, blocks, extent, values.to(self.device), False)

    def checksum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the checksum of what `gather` has written, as baton_kernels.reference.blocks defines it, [1] int64."""
        return self._ops.checksum(values)

    def _move(self, out: bool, blocks: list[int], extent: Extent, values: torch.Tensor, check: bool) -> torch.Tensor:
        size = self._block_size
        first = extent.first_token // size
        table = to_device(blocks[first : -(-extent.tokens.stop // size)], self.device)
        tokens = slice(extent.tokens.start - first * size, extent.tokens.stop - first * size)
        move = self._ops.gather_kv if out else self._ops.scatter_kv
        return move(self.planes, table, tokens, extent.layers, extent.heads, values, check)
