"""The memory behind the block pool: keys and values of every layer, by block."""

import torch


class KvCache:
    """One tensor [layers, 2 (K, V), blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks, block_size, num_heads, head_dim)
        # Zeros, not empty: a masked key still enters the arithmetic, and NaN times zero is NaN.
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        data = self.data
        return data.numel() // data.shape[2] * data.element_size()

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, [blocks, block_size, kv_heads, head_dim] each."""
        return self.data[layer, 0], self.data[layer, 1]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in all layers."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self.data[:, :, list(targets)] = self.data[:, :, list(sources)]

    def gather(self, blocks: list[int], out: torch.Tensor) -> None:
        """Write blocks into out [layers, 2, len(blocks), block_size, kv_heads, head_dim], in that order."""
        indices = torch.tensor(blocks, device=self.data.device)
        if out.device == self.data.device:
            torch.index_select(self.data, 2, indices, out=out)
        else:
            out.copy_(self.data.index_select(2, indices))

    def scatter(self, blocks: list[int], values: torch.Tensor) -> None:
        """Fill blocks from values, shaped as `gather` writes them."""
        device = self.data.device
        self.data.index_copy_(2, torch.tensor(blocks, device=device), values.to(device))
