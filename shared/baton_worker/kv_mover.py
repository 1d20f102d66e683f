"""Moves KV between the engine's cache and the staging slots or other GPUs through which it goes to other pods."""

import logging
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
from .landing import Landing
from .messages import Imported, ImportPiece, Output, PairId, PairLost, Piece, ReceivePiece, SendPiece
from .pair_memory import LANDING_SLOTS, SEND_SLOTS, SLOT_BYTES, PairMemory
from .pairs import Pairs

log = logging.getLogger(__name__)

_LEAST_SLOT_BYTES = 4 << 20
_NUM_SLOTS = 8


class KvMover:
    """Exports KV from the engine's cache and imports KV into it. It puts its messages into `output`."""

    def __init__(self, engine: Engine, export_fd: int, import_fd: int, pairs: PairMemory) -> None:
        self.output = Output()
        self._engine = engine
        cache, layout = engine.runner.cache, engine.runner.cache.layout
        device = cache.device
        slot_bytes, gpu_slot_bytes = (
            max(size // layout.token_bytes, 1) * layout.token_bytes for size in (_LEAST_SLOT_BYTES, SLOT_BYTES)
        )
        self.exports = StagingArena.sized(export_fd, slot_bytes, _NUM_SLOTS)
        self._imports = StagingArena.sized(import_fd, slot_bytes, _NUM_SLOTS)
        self._copies = CopyStream(device)
        # Not in the stream of the steps, where received KV would keep its slot until all queued steps are over.
        self._scatters = CopyStream(device, before_steps=True)
        self._pairs = Pairs(device, pairs.most)
        self._outgoing = GpuSlots(SEND_SLOTS, gpu_slot_bytes, device)
        self._landing = Landing(pairs.most, LANDING_SLOTS, gpu_slot_bytes, device)
        size = engine.config.block_size
        self._queue = ExportQueue(_NUM_SLOTS, slot_bytes // layout.layer_bytes, size)
        self._gpu_queue = ExportQueue(SEND_SLOTS, gpu_slot_bytes // layout.layer_bytes, size)
        self._lanes: dict[int, int] = {}  # by the id of the exporting request
        self._gpu_lanes: dict[int, bool] = {}  # lanes that use a pair of GPUs: whether pieces get a checksum
        # Pairs that begin once closed pairs have freed their memory. The id is None for a pair that this end opens.
        self._beginning: deque[tuple[int, bytes | None]] = deque()
        if device.type == "cuda":
            _pin(self.exports)
            _pin(self._imports)
            # A kernel is loaded at its first use, which waits for an idle device.
            engine.runner.cache.warm_up()
            torch.cuda.synchronize()

    @property
    def gpu_slot_bytes(self) -> int:
        """The most bytes of a piece from GPU to GPU; 0 when there can be no such pieces."""
        return self._outgoing.slot_bytes if self.most_pairs else 0

    @property
    def most_pairs(self) -> int:
        """The most pairs that can be open at a time."""
        return self._pairs.most

    @property
    def ready(self) -> bool:
        """Whether `pack` has something to do."""
        return self._queue.ready or self._gpu_queue.ready

    @property
    def busy(self) -> bool:
        """Whether `settle` may have something to do without a command."""
        return self._copies.busy or self._scatters.busy or self._pairs.busy

    # Exports

    def expect(self, id: int, lane: int) -> None:
        """Prepare for a request's exports. lane: of the decode pod that gets them, and also the number of its pair."""
        self._lanes[id] = lane

    def put(self, export: Export) -> None:
        lane = self._lanes[export.id]
        (self._gpu_queue if lane in self._gpu_lanes else self._queue).put(lane, export)

    def drop(self, id: int) -> None:
        """Drop the exports of a request that have not been packed."""
        if self._lanes.pop(id, None) is not None:
            self._queue.drop(id)
            self._gpu_queue.drop(id)

    def free(self, slot: int, on_gpu: bool) -> None:
        """Free a slot that has been read or that nobody will read. on_gpu: its piece was never announced."""
        if on_gpu:
            self._gpu_queue.free(slot, unused=True)
        else:
            self._queue.free(slot)

    def pack(self) -> None:
        """Copy KV that is complete into free slots."""
        while (taken := self._queue.take()) is not None:
            export, slot = taken
            extent = export.extent
            view = self._view(self.exports, slot, extent)
            piece = Piece(export.id, extent, slot)
            self._copies.run(partial(self._gather, export.tables, extent, view), partial(self._packed, piece))
        while (taken := self._gpu_queue.take()) is not None:
            self._pack_on_gpu(*taken)

    def _pack_on_gpu(self, export: Export, slot: int) -> None:
        cache, extent = self._engine.runner.cache, export.extent
        check = self._gpu_lanes.get(self._lanes.get(export.id, 0), True)
        view = self._outgoing.bytes(slot, cache.layout.size(extent))
        sums: list[torch.Tensor] = []

        def gather() -> None:
            total = cache.gather(export.tables, extent, view, check)
            if check:
                sums.append(to_host(total))

        def then() -> None:
            self._packed(Piece(export.id, extent, slot, on_gpu=True, checksum=int(sums[0]) if check else None))

        self._copies.run(gather, then)

    def send(self, command: SendPiece) -> None:
        view = self._outgoing.bytes(command.slot, command.size)
        self._pairs.send(command.pair, view, lambda sent: self._gpu_queue.free(command.slot))

    def _gather(self, tables: list[list[int]], extent: Extent, view: torch.Tensor) -> None:
        cache = self._engine.runner.cache
        if view.device == cache.device:
            cache.gather(tables, extent, view)
            return
        values = torch.empty_like(view, device=cache.device)
        cache.gather(tables, extent, values)
        view.copy_(values, non_blocking=True)

    def _packed(self, piece: Piece) -> None:
        self.output.pieces.append(piece)

    # Imports

    def unpack(self, piece: ImportPiece) -> None:
        view = self._view(self._imports, piece.slot, piece.extent)
        device = self._engine.runner.cache.device
        if view.device == device:
            self._import(piece.id, piece.generation, piece.extent, view)
            self.output.freed_slots.append(piece.slot)
            return
        landed: list[torch.Tensor] = []

        def then() -> None:
            self.output.freed_slots.append(piece.slot)
            # The copy stream allocated this tensor. It must not reuse the memory before this stream has read it.
            landed[0].record_stream(torch.cuda.current_stream())
            self._import(piece.id, piece.generation, piece.extent, landed[0])

        self._copies.run(lambda: landed.append(view.to(device, non_blocking=True)), then)

    def receive(self, piece: ReceivePiece) -> None:
        """Receive a piece that was announced. If that is impossible, end the pair, as later pieces would not fit."""
        problem = self._landing.put(piece) or self._misfit(piece)
        if problem is not None:
            self._lose_pair(piece.pair, problem)
        self._land()

    def _misfit(self, piece: ReceivePiece) -> str | None:
        """Return why a piece cannot be KV of this model; None when it can."""
        if piece.extent is None:
            return None
        size = self._engine.runner.cache.layout.size(piece.extent)
        return None if size == piece.size else "the announced size of a piece is not that of its extent"

    def _land(self) -> None:
        for piece, slot in self._landing.take():
            view = self._landing.memory.bytes(slot, piece.size)
            self._pairs.receive(piece.pair, view, partial(self._landed, piece, slot))

    def _landed(self, piece: ReceivePiece, slot: int, received: bool) -> None:
        free = partial(self._free_landing, slot)
        if not received or piece.extent is None:
            free()
            return
        view = self._landing.memory.bytes(slot, piece.size)
        scatter = partial(self._import, piece.id, piece.generation, piece.extent, view)
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

    def _free_landing(self, slot: int) -> None:
        pair = self._landing.free(slot)
        if pair is not None:
            self.output.landed.append(pair)

    def _import(self, id: int, generation: int, extent: Extent, values: torch.Tensor) -> None:
        complete = self._engine.import_kv(id, generation, extent, values)
        if complete is None:
            self.output.stale.append(id)
        elif complete:
            self.output.imported.append(Imported(id, generation))

    # Pairs

    def open_pair(self, pair: int) -> None:
        """Begin a pair as its sender."""
        self._begin(pair, None)

    def join_pair(self, pair: int, unique_id: bytes) -> None:
        """Begin a pair as its receiver."""
        self._begin(pair, unique_id)

    def _begin(self, pair: int, unique_id: bytes | None) -> None:
        if self._pairs.num_open + len(self._beginning) < self._pairs.most:
            self._beginning.append((pair, unique_id))
            self._begin_pairs()
        else:
            self.output.pairs_lost.append(PairLost(pair, "the memory is not enough for one more pair"))

    def _begin_pairs(self) -> None:
        while self._beginning and self._pairs.room and (self._beginning[0][1] is None or self._landing.room):
            pair, unique_id = self._beginning.popleft()
            try:
                if unique_id is None:
                    self._outgoing.allocate(range(SEND_SLOTS))
                    self.output.pair_ids.append(PairId(pair, self._pairs.open(pair)))
                else:
                    self._landing.open(pair)
                    self._pairs.join(pair, unique_id)
            except (RuntimeError, OSError, ValueError) as error:  # no memory for the pair, or an error of NCCL
                self._lose_pair(pair, str(error))

    def use_pair(self, pair: int, check: bool, credit: int | None) -> None:
        """From now on send the exports of the pair's lane over the pair, if it is up. check, credit: as in UsePair."""
        if self._pairs.up(pair):
            self._gpu_lanes[pair] = check
            if credit is not None:
                self._gpu_queue.limit(pair, credit)

    def grant_pair(self, pair: int, pieces: int) -> None:
        self._gpu_queue.grant(pair, pieces)

    def close_pair(self, pair: int) -> None:
        """End a pair. Its slots are freed when its transfers have ended. Its waiting exports go through the host.

        An unknown pair is ignored.
        """
        self._beginning = deque(entry for entry in self._beginning if entry[0] != pair)
        self._gpu_lanes.pop(pair, None)
        for export in self._gpu_queue.take_lane(pair):
            self._queue.put(pair, export)
        self._landing.close(pair)
        self._pairs.close(pair)

    def _lose_pair(self, pair: int, reason: str) -> None:
        self.close_pair(pair)
        self.output.pairs_lost.append(PairLost(pair, reason))

    def settle(self) -> None:
        """Do the work that follows copies and transfers that are over."""
        self._copies.settle()
        self._scatters.settle()
        up, lost = self._pairs.settle()
        self.output.pairs_up += up
        for pair, reason in lost.items():
            self._lose_pair(pair, reason)
        self._begin_pairs()
        self._land()

    def _view(self, arena: StagingArena, slot: int, extent: Extent) -> torch.Tensor:
        """Return the bytes of an extent in a slot."""
        count = self._engine.runner.cache.layout.size(extent)
        return torch.frombuffer(arena.buffer, dtype=torch.uint8, count=count, offset=slot * arena.slot_bytes)


def _pin(arena: StagingArena) -> None:
    """Pin an arena, so that the GPU can copy from and to it by itself. Other copies are slower and block the host."""
    memory = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
    if int(code):
        log.warning("staging memory cannot be pinned: CUDA error %s", code)
