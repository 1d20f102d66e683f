"""Moves KV between the engine's cache and the staging slots or other GPUs through which it goes to other pods."""

import logging
from collections import deque
from functools import partial

import torch

from baton_common.extent import Extent
from baton_common.rank_parts import split_ids
from baton_engine.engine import Engine
from baton_engine.executor import Fence
from baton_engine.exports import Export
from baton_engine.pairs.copy_stream import CopyStream
from baton_engine.pairs.ends import PairEnds
from baton_kv.staging import StagingArena

from .export_queue import ExportQueue
from .landing import Landing
from .messages import (
    Imported,
    ImportPiece,
    JoinPair,
    OpenPair,
    Output,
    PairId,
    PairLost,
    Piece,
    ReceivePiece,
    SendPiece,
)
from .pair_memory import LANDING_SLOTS, SEND_SLOTS, SLOT_BYTES, PairMemory

log = logging.getLogger(__name__)

_LEAST_SLOT_BYTES = 4 << 20
_NUM_SLOTS = 8


class KvMover:
    """Exports KV from the engine's cache and imports KV into it. It puts its messages into `output`."""

    def __init__(self, engine: Engine, ends: PairEnds, export_fd: int, import_fd: int, pairs: PairMemory) -> None:
        self.output = Output()
        self._engine = engine
        cache, layout = engine.runner.cache, engine.runner.cache.layout
        device = cache.device
        # A model may have states only.
        unit = layout.token_bytes or layout.layer_bytes
        slot_bytes, gpu_slot_bytes = (max(size // unit, 1) * unit for size in (_LEAST_SLOT_BYTES, SLOT_BYTES))
        self.exports = StagingArena.sized(export_fd, slot_bytes, _NUM_SLOTS)
        self._imports = StagingArena.sized(import_fd, slot_bytes, _NUM_SLOTS)
        self._copies = CopyStream(device)
        self._ends = ends
        self.most_pairs = pairs.most
        self._gpu_slot_bytes = gpu_slot_bytes
        self._landing = Landing(pairs.most, LANDING_SLOTS)
        size = engine.config.block_size
        self._queue = ExportQueue(_NUM_SLOTS, slot_bytes // layout.layer_bytes, size)
        self._gpu_queue = ExportQueue(SEND_SLOTS, gpu_slot_bytes // layout.layer_bytes, size)
        self._lanes: dict[int, int] = {}  # by the id of the exporting request
        self._gpu_lanes: dict[int, bool] = {}  # lanes that use a pair of GPUs: whether pieces get a checksum
        self._on_gpu: dict[int, Extent] = {}  # the extent that was packed, by GPU slot
        self._links: dict[int, int] = {}  # by pair, open or beginning: the connections that each rank has for it
        self._beginning: deque[OpenPair | JoinPair] = deque()  # until closed pairs have freed their memory
        if device.type == "cuda":
            _pin(self.exports)
            _pin(self._imports)

    @property
    def gpu_slot_bytes(self) -> int:
        """The most bytes of a piece from GPU to GPU, on all ranks; 0 when there can be no such pieces."""
        return self._gpu_slot_bytes if self.most_pairs else 0

    @property
    def ready(self) -> bool:
        """Whether `pack` has something to do."""
        return self._queue.ready or self._gpu_queue.ready

    @property
    def busy(self) -> bool:
        """Whether `settle` may have something to do without a command."""
        return self._copies.busy or self._ends.busy

    # Exports

    def expect(self, id: int, lane: int) -> None:
        """Prepare for a request's exports. lane: that of the decode pod that gets them, and the number of its pair."""
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
        """Copy KV into free slots, as soon as it is complete."""
        while (taken := self._queue.take()) is not None:
            export, slot = taken
            extent = export.extent
            view = self._view(self.exports, slot, extent)
            piece = Piece(export.id, extent, slot)
            self._copies.run(partial(self._gather, export, view), partial(self._packed, piece))
        while (taken := self._gpu_queue.take()) is not None:
            self._pack_on_gpu(*taken)

    def _pack_on_gpu(self, export: Export, slot: int) -> None:
        pair = self._lanes.get(export.id, 0)
        check = self._gpu_lanes.get(pair, True)
        self._on_gpu[slot] = export.extent

        def then(packed: bool, checksum: int) -> None:
            self._packed(Piece(export.id, export.extent, slot, on_gpu=True, checksum=checksum if check else None))

        self._ends.pack(pair, slot, export.tables, export.extent, check, export.fence, then)

    def send(self, command: SendPiece) -> None:
        slot = command.slot
        self._ends.send(command.pair, slot, self._on_gpu[slot], lambda sent, _: self._gpu_queue.free(slot))

    def _gather(self, export: Export, view: torch.Tensor) -> None:
        cache = self._engine.runner.cache
        if export.fence is not None:
            export.fence.wait()
        if view.device == cache.device:
            cache.gather(export.tables, export.extent, view)
            return
        values = torch.empty_like(view, device=cache.device)
        cache.gather(export.tables, export.extent, values)
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
        problem = self._misfit(piece) or self._landing.put(piece)
        if problem is not None:
            self._lose_pair(piece.pair, problem)
        self._land()

    def _misfit(self, piece: ReceivePiece) -> str | None:
        """Return why a piece cannot be KV of this model that fits into a slot; None when it can."""
        layout, extent = self._engine.runner.cache.layout, piece.extent
        whole = layout.holds(extent) and extent.num_heads == layout.num_heads
        fits = whole and 0 < layout.size(extent) <= self._gpu_slot_bytes
        return None if fits else "the announced piece is empty, is larger than a slot, or lacks heads of this model"

    def _land(self) -> None:
        for piece, slot in self._landing.take():
            check = piece.id is not None and piece.checksum is not None
            self._ends.receive(piece.pair, slot, piece.extent, check, partial(self._landed, piece, slot))

    def _landed(self, piece: ReceivePiece, slot: int, received: bool, checksum: int) -> None:
        # KV of a pair that was lost in the meantime is ordered again.
        if not received or piece.id is None or not self._ends.up(piece.pair):
            self._free_landing(slot)
            return
        if piece.checksum is not None and piece.checksum != checksum:
            self.output.damaged.append(Imported(piece.id, piece.generation))
            self._free_landing(slot)
            return

        def write(tables: list[list[int]], fence: Fence | None) -> None:
            self._ends.unpack(
                piece.pair, slot, tables, piece.extent, fence, lambda written, _: self._free_landing(slot)
            )

        complete = self._engine.import_by(piece.id, piece.generation, piece.extent, write)
        if complete is None:
            self._free_landing(slot)
        self._note_import(piece.id, piece.generation, complete)

    def _free_landing(self, slot: int) -> None:
        pair = self._landing.free(slot)
        if pair is not None:
            self.output.landed.append(pair)

    def _import(self, id: int, generation: int, extent: Extent, values: torch.Tensor) -> None:
        self._note_import(id, generation, self._engine.import_kv(id, generation, extent, values))

    def _note_import(self, id: int, generation: int, complete: bool | None) -> None:
        """complete: as Engine.import_kv returns it."""
        if complete is None:
            self.output.stale.append(id)
        elif complete:
            self.output.imported.append(Imported(id, generation))

    # Pairs

    def begin_pair(self, command: OpenPair | JoinPair) -> None:
        """Begin a pair as its sender or its receiver."""
        links = self._ends.links_of(isinstance(command, OpenPair), command.ranks)
        if sum(self._links.values()) + links > self.most_pairs:
            self.output.pairs_lost.append(PairLost(command.pair, "the memory is not enough for one more pair"))
            return
        self._links[command.pair] = links
        self._beginning.append(command)
        self._begin_pairs()

    def _begin_pairs(self) -> None:
        while self._beginning and self._has_room(self._beginning[0]):
            command = self._beginning.popleft()
            pair, ranks = command.pair, command.ranks
            try:
                if isinstance(command, OpenPair):
                    ids = self._ends.open(pair, ranks, list(range(SEND_SLOTS)), self._gpu_slot_bytes)
                    self.output.pair_ids.append(PairId(pair, b"".join(ids)))
                else:
                    ids = split_ids(command.unique_ids)
                    self._ends.join(pair, ranks, ids, self._landing.open(pair), self._gpu_slot_bytes)
            except (RuntimeError, OSError) as error:  # raised by NCCL
                self._lose_pair(pair, str(error))

    def _has_room(self, command: OpenPair | JoinPair) -> bool:
        """Whether a pair can begin. A closed pair holds its memory until its transfers have ended."""
        room = self._ends.links + self._links[command.pair] <= self.most_pairs
        return room and (isinstance(command, OpenPair) or self._landing.room)

    def use_pair(self, pair: int, check: bool, credit: int | None) -> None:
        """From now on send the exports of the pair's lane over the pair, if it is up. check, credit: as in UsePair."""
        if self._ends.up(pair):
            self._gpu_lanes[pair] = check
            if credit is not None:
                self._gpu_queue.limit(pair, credit)

    def grant_pair(self, pair: int, pieces: int) -> None:
        self._gpu_queue.grant(pair, pieces)

    def close_pair(self, pair: int) -> None:
        """End a pair. Its slots are freed when its transfers have ended. Its waiting exports go through the host.

        An unknown pair is ignored.
        """
        self._beginning = deque(command for command in self._beginning if command.pair != pair)
        self._links.pop(pair, None)
        self._gpu_lanes.pop(pair, None)
        for export in self._gpu_queue.take_lane(pair):
            self._queue.put(pair, export)
        self._landing.close(pair)
        self._ends.close(pair)

    def _lose_pair(self, pair: int, reason: str) -> None:
        self.close_pair(pair)
        self.output.pairs_lost.append(PairLost(pair, reason))

    def settle(self) -> None:
        """Do the work that follows finished copies and transfers."""
        self._copies.settle()
        up, lost = self._ends.settle()
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
