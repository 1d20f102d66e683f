"""The KV caches of all ranks and stages as one cache, which gathers and scatters pieces of KV with all heads."""

from collections.abc import Iterator, Sequence

import msgspec
import torch

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout
from baton_engine.kv_cache import KvCache
from baton_kernels.reference.blocks import checksum_reference

from .kv_part import Found, KvPart, SeatKv, plane_views
from .messages import Gather, Scatter
from .processes import EXCHANGE_BYTES, RankProcesses


class RanksCache:
    """Implements KvStore. The bytes of pieces are on the host, through which each rank's part goes.

    layout: that of the whole model.
    """

    device = torch.device("cpu")

    def __init__(self, layout: KvLayout, own: KvCache, processes: RankProcesses) -> None:
        """own: the cache of this process, which is rank 0."""
        self.layout = layout
        self.num_blocks, self.scales, self.facts, self.format = own.num_blocks, own.scales, own.facts, own.format
        self._own, self._part, self._processes = own, KvPart(own), processes
        self._seats = [SeatKv(layout, seat) for seat in processes.seats]

    def warm_up(self) -> None:
        """Use the kernels of all ranks once: each is compiled at its first use, which would delay requests."""
        one = self.layout.extent(0, 1)
        blocks, values = [[0]] * len(self.layout.groups), torch.zeros(self.layout.size(one), dtype=torch.uint8)
        self.gather(blocks, one, values)
        self.scatter(blocks, one, values)

    def gather(
        self, tables: Sequence[list[int]], extent: Extent, out: torch.Tensor, check: bool = False
    ) -> torch.Tensor:
        """As in KvCache."""
        for chunk, views in self._chunks(extent, out):
            self._processes.send(Gather(list(tables), chunk))
            for number, found in self._parts(chunk):
                if number == 0:
                    values = torch.empty(self._part.size(found.extent), dtype=torch.uint8)
                    self._part.gather(tables, found.extent, values)
                    self._copy(values, found, views, back=False)
            self._processes.await_confirmations()
            for number, found in self._parts(chunk):
                if number and self._seats[number].owns:
                    self._copy(self._exchange(number, found), found, views, back=False)
        return checksum_reference(out.view(-1)) if check else torch.zeros(1, dtype=torch.int64)

    def scatter(self, tables: Sequence[list[int]], extent: Extent, values: torch.Tensor) -> None:
        """As in KvCache."""
        for chunk, views in self._chunks(extent, values.to(self.device)):
            for number, found in self._parts(chunk):
                if number:
                    self._copy(self._exchange(number, found), found, views, back=True)
            self._processes.send(Scatter(list(tables), chunk))
            for number, found in self._parts(chunk):
                if number == 0:
                    own = torch.empty(self._part.size(found.extent), dtype=torch.uint8)
                    self._copy(own, found, views, back=True)
                    self._part.scatter(tables, found.extent, own)
            self._processes.await_confirmations()

    def checksum(self, values: torch.Tensor) -> torch.Tensor:
        """As in KvCache."""
        return checksum_reference(values)

    def _chunks(self, extent: Extent, values: torch.Tensor) -> Iterator[tuple[Extent, list[torch.Tensor]]]:
        """Yield parts of an extent that fit into the memory for the exchange, and the views of their planes."""
        views = plane_views(self.layout, extent, values.view(-1))
        most = max(EXCHANGE_BYTES // self.layout.layer_bytes, 1)
        layers = min(extent.num_layers, most)
        tokens = max(most // layers, 1)
        for layer in range(0, extent.num_layers, layers):
            for token in range(0, extent.num_tokens, tokens):
                chunk = msgspec.structs.replace(
                    extent,
                    first_layer=extent.first_layer + layer,
                    num_layers=min(layers, extent.num_layers - layer),
                    first_token=extent.first_token + token,
                    num_tokens=min(tokens, extent.num_tokens - token),
                )
                yield chunk, [view[layer : layer + layers, token : token + tokens] for view in views]

    def _parts(self, chunk: Extent) -> Iterator[tuple[int, Found]]:
        """Yield the number of each process that has a part of a chunk, and that part."""
        for number, seat in enumerate(self._seats):
            found = seat.within(chunk)
            if found is not None:
                yield number, found

    def _exchange(self, number: int, found: Found) -> torch.Tensor:
        return self._processes.ranks[number - 1].exchange[: self._part.size(found.extent)]

    def _copy(self, values: torch.Tensor, found: Found, views: list[torch.Tensor], *, back: bool) -> None:
        """Copy a process's part to its place in a piece, or back from there."""
        for whole, own in zip(views, plane_views(self._own.layout, found.extent, values), strict=True):
            place = whole[found.layers, :, found.heads]
            target, source = (own, place) if back else (place, own)
            target.copy_(source)
