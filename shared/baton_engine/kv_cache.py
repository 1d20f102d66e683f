"""The memory behind the block pool: keys and values of every layer, by block."""

import math

import torch

from baton_common.extent import Extent

from .ops import Ops
from .transfer import to_device

# Bounds what copies of blocks hold for a moment.
_COPY_BYTES = 64 << 20


class KvCache:
    """One tensor [layers, 2 (K, V), blocks, block_size, kv_heads, head_dim], without any block until `allocate`."""

    def __init__(
        self,
        *,
        num_layers: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self._block_shape = (block_size, num_heads, head_dim)
        self._ops = ops
        self.data = torch.empty(num_layers, 2, 0, *self._block_shape, dtype=dtype, device=device)
        self._layers = self._by_layer()

    def allocate(self, num_blocks: int) -> None:
        """Have so many blocks, of zeros, in place of those there were. `layer` is to be asked anew."""
        num_layers, dtype, device = len(self.data), self.data.dtype, self.data.device
        # The old ones go first: there may be no room for both.
        self.data = torch.empty(0)
        self._layers = []
        # Zeros, not empty: a masked key still enters the arithmetic, and NaN times zero is NaN.
        self.data = torch.zeros(num_layers, 2, num_blocks, *self._block_shape, dtype=dtype, device=device)
        self._layers = self._by_layer()

    def _by_layer(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(layer[0], layer[1]) for layer in self.data]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, keys and values."""
        return self.block_bytes // self._block_shape[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return len(self.data) * 2 * math.prod(self._block_shape) * self.data.element_size()

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, [blocks, block_size, kv_heads, head_dim] each."""
        return self._layers[layer]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in all layers, one after another."""
        most = max(_COPY_BYTES // self.block_bytes, 1)
        for first in range(0, len(pairs), most):
            sources, targets = zip(*pairs[first : first + most], strict=True)
            self.data[:, :, list(targets)] = self.data[:, :, list(sources)]

    def gather(self, blocks: list[int], extent: Extent, out: torch.Tensor, check: bool = False) -> torch.Tensor:
        """Write part of a block table's KV into out, contiguous [layers, 2, tokens, kv_heads, head_dim] of the extent.

        Both are on one device. Returns, with `check`, out's `checksum`.
        """
        return self._move(True, blocks, extent, out, check)

    def scatter(self, blocks: list[int], extent: Extent, values: torch.Tensor) -> None:
        """Fill part of a block table from values, shaped as `gather` writes them, on any device."""
        self._move(False, blocks, extent, values.to(self.data.device), False)

    def checksum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the checksum of what `gather` has written, as baton_kernels.reference.blocks defines it, [1] int64."""
        return self._ops.checksum(values)

    def _move(self, out: bool, blocks: list[int], extent: Extent, values: torch.Tensor, check: bool) -> torch.Tensor:
        size = self._block_shape[0]
        first = extent.first_token // size
        table = to_device(blocks[first : -(-extent.tokens.stop // size)], self.data.device)
        move = self._ops.gather_kv if out else self._ops.scatter_kv
        return move(self.data, table, extent.first_token % size, extent.layers, extent.heads, values, check)
