"""The messages between a worker's RPC process and its engine process."""

import msgspec

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout
from baton_engine.config import EngineConfig
from baton_engine.delta import Delta, Load, Reservation
from baton_engine.sequence import Request

# The most pieces that may be announced for a pair and not yet received. A peer that supports credit announces fewer. A
# peer of an older version announces the pieces in its own slots and the pieces that NCCL has accepted from it.
MOST_ANNOUNCED = 1_024


class Start(msgspec.Struct, tag=True):
    """The first message: build the engine. export_fd, import_fd: empty memory files for the staging arenas."""

    config: EngineConfig
    service: str
    log_level: str
    export_fd: int
    import_fd: int
    gpu_pair_memory: float = 0.0  # share of the GPU's memory that pairs may hold; 0 = no pairs


class Add(msgspec.Struct, tag=True):
    """Run a request. lane: its exports wait in this lane, never for the staging slots of another lane."""

    request: Request
    lane: int = 0


class Abort(msgspec.Struct, tag=True):
    """End a request, or one of its choices after they have forked. This also frees the request's export."""

    id: int
    choice: int | None = None


class ImportPiece(msgspec.Struct, tag=True):
    """Write the piece in an import slot into the blocks of a reservation, then free the slot."""

    id: int
    generation: int
    extent: Extent
    slot: int


class SendPiece(msgspec.Struct, tag=True):
    """Send the piece in a GPU slot, which was announced to the other end of the pair, then free the slot."""

    pair: int
    slot: int


class ReceivePiece(msgspec.Struct, tag=True):
    """Receive a piece that the other end of a pair has announced. id: of the request; None = discard the piece."""

    pair: int
    extent: Extent
    checksum: int | None = None  # None = unknown, so the piece is not checked
    id: int | None = None
    generation: int = 0


class OpenPair(msgspec.Struct, tag=True):
    """Connect to another engine's GPUs in order to send. pair: also the number of the lane whose exports use it.

    ranks: of the other engine.
    """

    pair: int
    ranks: int


class JoinPair(msgspec.Struct, tag=True):
    """Connect to the GPUs of the engine that opened a pair, in order to receive. unique_ids: as in GpuPair.id."""

    pair: int
    ranks: int
    unique_ids: bytes


class UsePair(msgspec.Struct, tag=True):
    """Send over a pair, because both ends are up. check: whether pieces get a checksum. credit: pieces that may be sent
    before the other end allows more; None = any number."""

    pair: int
    check: bool = True
    credit: int | None = None


class GrantPair(msgspec.Struct, tag=True):
    """Send up to this many more pieces over a pair. The other end can receive them."""

    pair: int
    pieces: int


class ClosePair(msgspec.Struct, tag=True):
    """End a pair. Its transfers are lost."""

    pair: int


class ImportTokens(msgspec.Struct, tag=True):
    """The first token of each choice, which a prefill pod has sampled."""

    id: int
    tokens: list[int]


class RestartImport(msgspec.Struct, tag=True):
    """Reserve again, because another prefill pod is tried. The answer is a reservation unless all KV has arrived."""

    id: int


class CancelImport(msgspec.Struct, tag=True):
    """Compute the missing KV here, because no prefill pod will deliver it."""

    id: int


class FreeSlot(msgspec.Struct, tag=True):
    """Free an export slot that has been read, or that nobody will read."""

    slot: int
    on_gpu: bool = False


class Ping(msgspec.Struct, tag=True):
    """Ask for a heartbeat: an output with the load."""


Command = (
    Start | Add | Abort | ImportPiece | ImportTokens | RestartImport | CancelImport | FreeSlot | Ping
    | SendPiece | ReceivePiece | OpenPair | JoinPair | UsePair | GrantPair | ClosePair
)  # fmt: skip


class Progress(msgspec.Struct, tag=True):
    """The progress of the engine's start. what: the thing being prepared. done, total: finished parts, all parts."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True):
    """The engine can serve. slot_bytes: of a staging slot."""

    fingerprint: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    layout: KvLayout
    slot_bytes: int
    num_slots: int
    gpu_slot_bytes: int = 0  # 0: KV cannot go from GPU to GPU
    gpu_pairs: int = 0  # the most that can be open at a time, where each rank has one connection for each pair
    gpu_landing_slots: int = 0  # of each pair
    gpus: list[str] = []  # identifies the GPU of each rank; empty: KV cannot go from GPU to GPU
    prefill_rate: float = 0.0  # tokens a second; 0 = not measured
    step_tokens: int = 0  # the most tokens that a step computes; 0 = unknown
    num_threads: int = 0  # threads that compute on CPU; 0 = a GPU computes
    threads_spin: bool = False  # whether these threads spin while they wait
    max_num_seqs: int = 128  # the most choices of a request
    kv_format: str = ""  # how the KV is stored, in words


class Refused(msgspec.Struct, tag=True):
    """The engine cannot be built; the message is for the operator."""

    message: str


class Rejected(msgspec.Struct, array_like=True):
    """A request that can never run here."""

    id: int
    param: str
    message: str


class Piece(msgspec.Struct, array_like=True):
    """Part of an exporting request's KV, packed into an export slot, on the host or the GPU."""

    id: int
    extent: Extent
    slot: int
    on_gpu: bool = False
    checksum: int | None = None  # only of a piece on the GPU whose pair uses checksums


class Imported(msgspec.Struct, array_like=True):
    """A reservation that has received all of its KV. In Output.damaged: one that has received a damaged piece."""

    id: int
    generation: int


class PairId(msgspec.Struct, array_like=True):
    """The ids by which the other end joins a pair that this engine has opened, as in GpuPair.id."""

    pair: int
    unique_ids: bytes


class PairLost(msgspec.Struct, array_like=True):
    """A pair is closed, and its transfers are lost."""

    pair: int
    reason: str


class Output(msgspec.Struct, tag=True, omit_defaults=True):
    """The results of one turn of the engine loop."""

    deltas: list[Delta] = []
    reservations: list[Reservation] = []
    rejections: list[Rejected] = []
    broken: list[int] = []  # requests that ended because the model computed NaN or infinity for them
    pieces: list[Piece] = []
    freed_slots: list[int] = []  # of the import arena
    imported: list[Imported] = []
    stale: list[int] = []  # requests to which a piece came too late
    damaged: list[Imported] = []  # reservations that got a piece with a wrong checksum from another GPU
    pair_ids: list[PairId] = []
    pairs_up: list[int] = []
    pairs_lost: list[PairLost] = []
    landed: list[int] = []  # the pair of each landing slot that is free again
    load: Load | None = None
    blocks_gained: list[int] = []  # keys of blocks that the prefix cache gained since the last message
    blocks_lost: list[int] = []  # keys of blocks that it lost since then


Event = Progress | Ready | Refused | Output
