"""KV between the engine's cache and what carries it from pod to pod: staging slots, or other GPUs."""

import logging
import math
from collections import deque
from functools import partial

import torch

from baton_common.extent import Extent
from baton_engine.engine import Engine
from baton_engine.exports import Export
from baton_engine.transfer import to_host
from baton_kv.staging import StagingArena

from .copy_stream import CopyStream
from .export_queue import ExportQueue
from .gpu_slots import GpuSlots
from .messages import Imported, ImportPiece, Output, PairId, PairLost, Piece, ReceivePiece, SendPiece
from .pairs import Pairs

log = logging.getLogger(__name__)

_LEAST_SLOT_BYTES = 4 << 20
_NUM_SLOTS = 8
# Between GPUs the work of the host for a message is worth more than a hundred megabytes.
_GPU_SLOT_BYTES = 256 << 20
_NUM_GPU_SLOTS = 3


class KvMover:
    """What it has to say is put into `output`."""

    def __init__(self, engine: Engine, export_fd: int, import_fd: int, gpu_pairs: bool) -> None:
        self.output = Output()
        self._engine = engine
        cache = engine.runner.cache
        device = cache.data.device
        slot_bytes, gpu_slot_bytes = (
            max(size // cache.token_bytes, 1) * cache.token_bytes for size in (_LEAST_SLOT_BYTES, _GPU_SLOT_BYTES)
        )
        self.exports = StagingArena.sized(export_fd, slot_bytes, _NUM_SLOTS)
        self._imports = StagingArena.sized(import_fd, slot_bytes, _NUM_SLOTS)
        self._copies = CopyStream(device)
        # Not in the stream of the steps: what arrives would keep its slot until those that are queued there are over.
        self._scatters = CopyStream(device, before_steps=True)
        self._pairs = Pairs(device, gpu_pairs)
        self._outgoing, self._landing = (GpuSlots(_NUM_GPU_SLOTS, gpu_slot_bytes, device) for _ in range(2))
        size = engine.config.block_size
        layer_bytes = cache.token_bytes // len(cache.data)
        self._queue = ExportQueue(_NUM_SLOTS, slot_bytes // layer_bytes, size)
        self._gpu_queue = ExportQueue(_NUM_GPU_SLOTS, gpu_slot_bytes // layer_bytes, size)
        self._lanes: dict[int, int] = {}  # of exporting requests
        self._gpu_lanes: dict[int, bool] = {}  # and whether their pieces go with a checksum
        self._arriving: deque[ReceivePiece] = deque()  # announced, but there is no slot for them
        if device.type == "cuda":
            _pin(self.exports)
            _pin(self._imports)
            self._load_kernels()

    @property
    def gpu_slot_bytes(self) -> int:
        """Bytes of a piece from GPU to GPU at most; 0 where that is impossible."""
        return self._outgoing.slot_bytes if self._pairs.offered else 0

    @property
    def ready(self) -> bool:
        """Whether `pack` has something to do."""
        return self._queue.ready or self._gpu_queue.ready

    @property
    def busy(self) -> bool:
        """Whether `settle` may have something to do without a command."""
        return self._copies.busy or self._scatters.busy or self._pairs.busy

    def _load_kernels(self) -> None:
        """At its first use a kernel is compiled, and its loading waits for all that the device is at."""
        cache = self._engine.runner.cache
        layers, _, _, _, heads, _ = cache.data.shape
        one = Extent(first_token=0, num_tokens=1, first_layer=0, num_layers=layers, first_head=0, num_heads=heads)
        values = torch.empty(self._shape(one), dtype=cache.data.dtype, device=cache.data.device)
        for check in (True, False):
            cache.gather([0], one, values, check)
        cache.checksum(values)
        cache.scatter([0], one, values)
        torch.cuda.synchronize()

    # Exports

    def expect(self, id: int, lane: int) -> None:
        """lane: whose slots a request's exports go through; the number of a pair, if it has one."""
        self._lanes[id] = lane

    def put(self, export: Export) -> None:
        lane = self._lanes[export.id]
        (self._gpu_queue if lane in self._gpu_lanes else self._queue).put(lane, export)

    def drop(self, id: int) -> None:
        """Forget what has not been packed of a request."""
        if self._lanes.pop(id, None) is not None:
            self._queue.drop(id)
            self._gpu_queue.drop(id)

    def free(self, slot: int, on_gpu: bool) -> None:
        """A slot has been read, or will not be."""
        (self._gpu_queue if on_gpu else self._queue).free(slot)

    def pack(self) -> None:
        """Put KV that is complete into free slots."""
        while (taken := self._queue.take()) is not None:
            export, slot = taken
            extent = export.extent
            view = self._view(self.exports, slot, extent)
            piece = Piece(export.id, extent, slot)
            self._copies.run(partial(self._gather, export.blocks, extent, view), partial(self._packed, piece))
        while (taken := self._gpu_queue.take()) is not None:
            self._pack_on_gpu(*taken)

    def _pack_on_gpu(self, export: Export, slot: int) -> None:
        cache, extent = self._engine.runner.cache, export.extent
        check = self._gpu_lanes.get(self._lanes.get(export.id, 0), True)
        view = self._outgoing.view(slot, self._shape(extent), cache.data.dtype)
        sums: list[torch.Tensor] = []

        def gather() -> None:
            total = cache.gather(export.blocks, extent, view, check)
            if check:
                sums.append(to_host(total))

        def then() -> None:
            self._packed(Piece(export.id, extent, slot, on_gpu=True, checksum=int(sums[0]) if check else None))

        self._copies.run(gather, then)

    def send(self, command: SendPiece) -> None:
        view = self._outgoing.bytes(command.slot, command.size)
        self._pairs.send(command.pair, view, lambda sent: self._gpu_queue.free(command.slot))

    def _gather(self, blocks: list[int], extent: Extent, view: torch.Tensor) -> None:
        cache = self._engine.runner.cache
        if view.device == cache.data.device:
            cache.gather(blocks, extent, view)
            return
        values = torch.empty(view.shape, dtype=view.dtype, device=cache.data.device)
        cache.gather(blocks, extent, values)
        view.copy_(values, non_blocking=True)

    def _packed(self, piece: Piece) -> None:
        self.output.pieces.append(piece)

    # Imports

    def unpack(self, piece: ImportPiece) -> None:
        view = self._view(self._imports, piece.slot, piece.extent)
        device = self._engine.runner.cache.data.device
        if view.device == device:
            self._import(piece.id, piece.generation, piece.extent, view)
            self.output.freed_slots.append(piece.slot)
            return
        landed: list[torch.Tensor] = []

        def then() -> None:
            self.output.freed_slots.append(piece.slot)
            # It belongs to the other stream, which must not use it again before this one has read it.
            landed[0].record_stream(torch.cuda.current_stream())
            self._import(piece.id, piece.generation, piece.extent, landed[0])

        self._copies.run(lambda: landed.append(view.to(device, non_blocking=True)), then)

    def receive(self, piece: ReceivePiece) -> None:
        self._arriving.append(piece)
        self._land()

    def _land(self) -> None:
        """Give slots to pieces in the order of their announcement, as their pairs will send them."""
        while self._arriving and (slot := self._landing.take()) is not None:
            piece = self._arriving.popleft()
            view = self._landing.bytes(slot, piece.size)
            self._pairs.receive(piece.pair, view, partial(self._landed, piece, slot))

    def _landed(self, piece: ReceivePiece, slot: int, received: bool) -> None:
        if not received or piece.extent is None:
            self._landing.free(slot)
            return
        view = self._landing.view(slot, self._shape(piece.extent), self._engine.runner.cache.data.dtype)
        scatter = partial(self._import, piece.id, piece.generation, piece.extent, view)
        free = partial(self._landing.free, slot)
        if piece.checksum is None:
            self._scatters.run(scatter, free)
            return
        sums: list[torch.Tensor] = []

        def then() -> None:
            if int(sums[0]) == piece.checksum:
                self._scatters.run(scatter, free)
            else:
                self.output.damaged.append(Imported(piece.id, piece.generation))
                free()

        self._copies.run(lambda: sums.append(to_host(self._engine.runner.cache.checksum(view))), then)

    def _import(self, id: int, generation: int, extent: Extent, values: torch.Tensor) -> None:
        complete = self._engine.import_kv(id, generation, extent, values)
        if complete is None:
            self.output.stale.append(id)
        elif complete:
            self.output.imported.append(Imported(id, generation))

    # Pairs

    def open_pair(self, pair: int) -> None:
        try:
            self._outgoing.allocate()
            self.output.pair_ids.append(PairId(pair, self._pairs.open(pair)))
        except RuntimeError as error:  # no memory for it, or NCCL's own
            self.output.pairs_lost.append(PairLost(pair, str(error)))

    def join_pair(self, pair: int, unique_id: bytes) -> None:
        try:
            self._landing.allocate()
            self._pairs.join(pair, unique_id)
        except RuntimeError as error:
            self.output.pairs_lost.append(PairLost(pair, str(error)))

    def use_pair(self, pair: int, check: bool) -> None:
        """From now on exports of the lane of this number go over its pair; check: with a checksum."""
        self._gpu_lanes[pair] = check

    def close_pair(self, pair: int) -> None:
        self._gpu_lanes.pop(pair, None)
        for export in self._gpu_queue.take_lane(pair):
            self._queue.put(pair, export)
        self._pairs.close(pair)

    def settle(self) -> None:
        """Do what was to follow copies and transfers that are over."""
        self._copies.settle()
        self._scatters.settle()
        up, lost = self._pairs.settle()
        self.output.pairs_up += up
        for pair, reason in lost.items():
            self.close_pair(pair)
            self.output.pairs_lost.append(PairLost(pair, reason))
        self._land()

    def _shape(self, extent: Extent) -> tuple[int, ...]:
        head_dim = self._engine.runner.cache.data.shape[-1]
        return extent.num_layers, 2, extent.num_tokens, extent.num_heads, head_dim

    def _view(self, arena: StagingArena, slot: int, extent: Extent) -> torch.Tensor:
        """Return a slot as [layers, 2, tokens, kv_heads, head_dim] of an extent."""
        shape, dtype = self._shape(extent), self._engine.runner.cache.data.dtype
        start, count = slot * arena.slot_bytes, math.prod(shape)
        return torch.frombuffer(arena.buffer, dtype=dtype, count=count, offset=start).view(shape)


def _pin(arena: StagingArena) -> None:
    """Let the GPU copy from and to an arena by itself; without that its copies are slower and make the host wait."""
    memory = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(code):
        log.warning("staging memory cannot be pinned: CUDA error %s", code)
