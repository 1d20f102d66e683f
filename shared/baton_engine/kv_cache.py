"""The memory behind the block pool: keys and values of every layer, by block."""

import math

import torch

from baton_common.extent import Extent

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
    ) -> None:
        self._block_shape = (block_size, num_heads, head_dim)
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

    def gather(self, blocks: list[int], extent: Extent, out: torch.Tensor) -> None:
        """Write part of a block table's KV into out, [layers, 2, tokens, kv_heads, head_dim] of the extent."""
        layers = self.data[extent.layers]
        indices = self._whole_blocks(blocks, extent)
        if indices is None:
            values = layers.flatten(2, 3).index_select(2, self._slots(blocks, extent))[:, :, :, extent.heads]
        elif out.device == self.data.device:
            torch.index_select(layers, 2, indices, out=out.view(len(layers), 2, -1, *self._block_shape))
            return
        else:
            values = layers.index_select(2, indices).flatten(2, 3)
        out.copy_(values)

    def scatter(self, blocks: list[int], extent: Extent, values: torch.Tensor) -> None:
        """Fill part of a block table from values, shaped as `gather` writes them."""
        layers, values = self.data[extent.layers], values.to(self.data.device)
        indices = self._whole_blocks(blocks, extent)
        if indices is None:
            layers.flatten(2, 3)[:, :, :, extent.heads].index_copy_(2, self._slots(blocks, extent), values)
        else:
            layers.index_copy_(2, indices, values.reshape(len(layers), 2, -1, *self._block_shape))

    def _whole_blocks(self, blocks: list[int], extent: Extent) -> torch.Tensor | None:
        """Return the blocks of an extent, or None if it has only parts of some."""
        size, num_heads, _ = self._block_shape
        if extent.first_token % size or extent.num_tokens % size or extent.num_heads != num_heads:
            return None
        first = extent.first_token // size
        return torch.tensor(blocks[first : first + extent.num_tokens // size], device=self.data.device)

    def _slots(self, blocks: list[int], extent: Extent) -> torch.Tensor:
        """Return where an extent's tokens are: block * block size + offset."""
        positions = torch.arange(extent.tokens.start, extent.tokens.stop)
        size = self._block_shape[0]
        return (torch.tensor(blocks)[positions // size] * size + positions % size).to(self.data.device)
