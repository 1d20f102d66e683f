"""The memory behind the block pool: the KV of all layers, by block."""

from collections.abc import Sequence

import msgspec
import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout, Run

from .kv_scales import KvScales
from .ops import Ops
from .transfer import to_device

# Bounds the temporary memory of block copies.
_COPY_BYTES = 64 << 20


class KvCache:
    """A tensor [depth, blocks, block_size, heads, dim] for each plane of a layout. It begins without blocks.

    depth: layers of a block. Each block belongs to one group of layers at a time. dtype: the dtype in which attention
    computes. scales: those of the codes in planes of 8 bits; None = the planes are not quantized. layers: those whose
    KV is here, by their numbers in the layout.
    """

    def __init__(
        self,
        layout: KvLayout,
        block_size: int,
        device: torch.device,
        ops: Ops,
        dtype: torch.dtype | None = None,
        layers: range | None = None,
    ) -> None:
        """dtype: None = that of the first plane. layers: None = all of the layout."""
        first = layout.planes[0]
        self.layout = layout
        self.num_groups = len(layout.groups)
        self.dtype = dtype or getattr(torch, first.dtype)
        self.scales = KvScales(layout.num_layers, first.heads, device) if first.has_scales else None
        self.device = device
        self._block_size = block_size
        self._ops = ops
        self.layers = range(layout.num_layers) if layers is None else layers
        self._runs = runs = layout.runs(slice(self.layers.start, self.layers.stop))
        self._group_of = {layer: run.group for run in runs for layer in range(run.first_layer, run.end_layer)}
        # A block holds consecutive layers of its group, as far as their KV is here, from the first of them on.
        self._first_places = {run.group: run.place for run in reversed(runs)}
        self.depth = max(run.place + run.num_layers - self._first_places[run.group] for run in runs)
        self.allocate(0)

    def allocate(self, num_blocks: int) -> None:
        """Replace all blocks by num_blocks blocks of zeros. Tensors that `layer` returned before are no longer used."""
        self.num_blocks = num_blocks
        # The old tensors are freed first, as there may be no room for both.
        self.planes: list[torch.Tensor] = []
        self._stored: list[torch.Tensor] = []
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        for plane in self.layout.planes:
            shape = self.depth, num_blocks, self._block_size, plane.heads, plane.dim
            self.planes.append(torch.zeros(shape, dtype=getattr(torch, plane.dtype), device=self.device))
        # Not every operation that copies by index knows every dtype of 8 bits.
        self._stored = [plane.view(torch.uint8) if plane.itemsize == 1 else plane for plane in self.planes]
        places = list(zip(*self.planes, strict=True))
        self._layers = {
            run.first_layer + at: self._heads_of(run.first_layer + at, places[self._place(run) + at])
            for run in self._runs
            for at in range(run.num_layers)
        }

    @property
    def block_bytes(self) -> int:
        return self.depth * self.layout.layer_bytes * self._block_size

    @property
    def facts(self) -> dict[str, str]:
        """The facts that two caches must share, beside those of the model, in order to exchange KV.

        Codes mean nothing without their scales. Scales must agree instead of being sent with the KV, because an answer
        may resume on another pod after its own is lost, and differently rounded KV would change its tokens.
        """
        facts = {"kv_dtype": str(self.planes[0].dtype)}
        if self.scales is None:
            return facts
        return {**facts, "dtype": str(self.dtype), "kv_scales": self.scales.digest}

    @property
    def format(self) -> str:
        """How the KV is stored, in words."""
        name = self.layout.planes[0].dtype
        return name if self.scales is None else f"{name} with the scales {self.scales.digest}"

    def group_of(self, layer: int) -> int:
        """Return the group of a layer, whose block tables say where the layer's KV is."""
        return self._group_of[layer]

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the planes of a layer, [blocks, block_size, heads, dim] each. They are contiguous, except that heads
        may lie further apart than they are long."""
        return self._layers[layer]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in all layers, one after another."""
        most = max(_COPY_BYTES // self.block_bytes, 1)
        for first in range(0, len(pairs), most):
            sources, targets = zip(*pairs[first : first + most], strict=True)
            for plane in self._stored:
                plane[:, list(targets)] = plane[:, list(sources)]

    def gather(
        self, tables: Sequence[list[int]], extent: Extent, out: torch.Tensor, check: bool = False
    ) -> torch.Tensor:
        """Write part of a sequence's KV into out, contiguous uint8 of as many bytes as the layout says.

        tables: the sequence's block table for each group of layers. Both are on one device. Returns, with `check`,
        out's `checksum`.
        """
        return self._move(True, tables, extent, out, check)

    def scatter(self, tables: Sequence[list[int]], extent: Extent, values: torch.Tensor) -> None:
        """Fill part of a sequence's KV from values, as `gather` writes them, on any device."""
        self._move(False, tables, extent, values.to(self.device), False)

    def warm_up(self) -> None:
        """Run all kernels that move KV once, as each is compiled and loaded at its first use. KV is not changed."""
        blocks, most = [[0]] * len(self.layout.groups), self.layout.num_heads
        whole = self.layout.extent(0, 1, self.layers.start, len(self.layers))
        # The width of a kernel's tiles depends on the number of heads, by powers of two.
        for heads in {most, *(1 << bit for bit in range(most.bit_length()))}:
            one = msgspec.structs.replace(whole, num_heads=heads)
            values = torch.zeros(self.layout.size(one), dtype=torch.uint8, device=self.device)
            for check in (True, False):
                self.gather(blocks, one, values, check)
            self.scatter(blocks, one, values)
        self.checksum(values)

    def checksum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the checksum of bytes written by `gather`, as baton_kernels.reference.blocks defines it, [1] int64."""
        return self._ops.checksum(values)

    def _move(
        self, out: bool, tables: Sequence[list[int]], extent: Extent, values: torch.Tensor, check: bool
    ) -> torch.Tensor:
        values = values.view(-1)
        blocks, rows = self.layout.places(extent, self._block_size)
        runs = self.layout.runs(extent.layers)
        on_device = {group: to_device(tables[group][blocks], self.device) for group in {run.group for run in runs}}
        move = self._ops.gather_kv if out else self._ops.scatter_kv
        layer_bytes, at = len(values) // extent.num_layers, 0
        for run in runs:
            part = values[at : at + run.num_layers * layer_bytes]
            at += len(part)
            places = slice(self._place(run), self._place(run) + run.num_layers)
            # Several calls share one checksum, so none of them can return it.
            checked = check and len(runs) == 1
            total = move(self._stored, on_device[run.group], rows, places, extent.heads, part, checked)
        return self.checksum(values) if check and len(runs) > 1 else total

    def _heads_of(self, layer: int, planes: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return a layer's planes with the heads that the layer has."""
        if not self.layout.heads:
            return planes
        heads, *dims = self.layout.heads[layer]
        return tuple(
            plane.view(*plane.shape[:2], heads, plane.shape[2] * plane.shape[3] // heads)[..., :dim]
            for plane, dim in zip(planes, dims, strict=True)
        )

    def _place(self, run: Run) -> int:
        """Return where the first layer of a run lies in each block of this cache."""
        return run.place - self._first_places[run.group]
