"""The KV of one rank's heads: its place in pieces of KV, which hold all heads, and copies to and from the host."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout
from baton_engine.config import ConfigError
from baton_engine.kv_cache import KvCache
from baton_engine.shard import RankNumber, head_part

from .seat import Seat

log = logging.getLogger(__name__)


class Found(NamedTuple):
    """The part of an extent that a process has. extent: its heads count from the first one of the process. layers,
    heads: the place of the part in the piece."""

    extent: Extent
    layers: slice
    heads: slice


class SeatKv:
    """Which of the layout's layers and heads a process has. All planes of a layout have the same heads.

    owns: whether the process provides them, where several ranks have the same head.
    """

    def __init__(self, layout: KvLayout, seat: Seat) -> None:
        rank, count = seat.rank, seat.ranks
        if any(plane.heads != layout.num_heads for plane in layout.planes):
            raise ConfigError("several processes cannot divide a KV cache whose planes have different heads")
        heads = head_part(layout.num_heads, RankNumber(rank, count), "key-value heads")
        self._first, self._end = heads.start, heads.stop
        self._layers = seat.stage.layers(layout.num_layers, layout.stage_starts)
        self.owns = rank == 0 or head_part(layout.num_heads, RankNumber(rank - 1, count)).start != heads.start

    def within(self, extent: Extent) -> Found | None:
        """Return the process's part of an extent; None = it has none."""
        first, end = max(extent.heads.start, self._first), min(extent.heads.stop, self._end)
        layers = range(max(extent.first_layer, self._layers.start), min(extent.layers.stop, self._layers.stop))
        if first >= end or not layers:
            return None
        part = msgspec.structs.replace(
            extent,
            first_layer=layers.start,
            num_layers=len(layers),
            first_head=first - self._first,
            num_heads=end - first,
        )
        return Found(
            part,
            slice(layers.start - extent.first_layer, layers.stop - extent.first_layer),
            slice(first - extent.first_head, end - extent.first_head),
        )


def plane_views(layout: KvLayout, extent: Extent, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the planes of a piece as views of its bytes, [layers, tokens, heads, bytes of a head] each."""
    layers = values.view(extent.num_layers, -1)
    views, first = [], 0
    for plane in layout.planes:
        size = extent.num_tokens * extent.num_heads * plane.head_bytes
        shape = extent.num_tokens, extent.num_heads, plane.head_bytes
        views.append(torch.unflatten(layers[:, first : first + size], 1, shape))
        first += size
    return views


def pin(memory: torch.Tensor) -> None:
    """Pin memory of the host, so that copies between it and the GPU are several times as fast."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(code):
        log.warning("memory for KV cannot be pinned: CUDA error %s", code)


class KvPart:
    """Moves the KV of a rank's heads between its cache and memory of the host.

    On a GPU, reading does not wait for steps that were launched before, because the KV to read was complete when the
    command was given. Writing happens after these steps and before later ones.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._on_gpu = cache.device.type == "cuda"
        self._stream = torch.cuda.Stream(cache.device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def size(self, extent: Extent) -> int:
        return self._cache.layout.size(extent)

    def gather(self, tables: Sequence[list[int]], extent: Extent, out: torch.Tensor) -> None:
        """extent: of the rank's own heads. out: bytes on the host, complete when this returns."""
        if self._stream is None:
            self._cache.gather(tables, extent, out)
            return
        with torch.cuda.stream(self._stream):
            values = torch.empty(len(out), dtype=torch.uint8, device=self._cache.device)
            self._cache.gather(tables, extent, values)
            out.copy_(values)
        self._stream.synchronize()

    def scatter(self, tables: Sequence[list[int]], extent: Extent, values: torch.Tensor) -> None:
        """values: bytes on the host, which may be overwritten when this returns."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                values = values.to(self._cache.device)
            self._stream.synchronize()
            values.record_stream(torch.cuda.current_stream())
        self._cache.scatter(tables, extent, values)
