"""What a worker's RPC process and its engine process say to one another."""

import msgspec

from baton_common.extent import Extent
from baton_common.kv_layout import KvLayout
from baton_engine.config import EngineConfig
from baton_engine.delta import Delta, Load, Reservation
from baton_engine.sequence import Request

# Pieces that may be announced for a pair and have not landed. A peer with credit announces fewer; one of a version
# without credit announces what lies in its own slots, and what NCCL has taken off its hands.
MOST_ANNOUNCED = 1_024


class Start(msgspec.Struct, tag=True):
    """First message: build the engine. The descriptors are of empty memory files for the two staging arenas."""

    config: EngineConfig
    service: str
    log_level: str
    export_fd: int
    import_fd: int
    gpu_pair_memory: float = 0.0  # part of a GPU's memory that pairs with others may hold; 0 = there are to be none


class Add(msgspec.Struct, tag=True):
    """lane: exports of different lanes do not wait for one another's staging slots."""

    request: Request
    lane: int = 0


class Abort(msgspec.Struct, tag=True):
    """Ends a request, or one choice of it once they have forked. Also frees an export."""

    id: int
    choice: int | None = None


class ImportPiece(msgspec.Struct, tag=True):
    id: int
    generation: int
    extent: Extent
    slot: int


class SendPiece(msgspec.Struct, tag=True):
    """The piece in a GPU slot has been announced to the other end of a pair: send it, then free the slot."""

    pair: int
    slot: int
    size: int


class ReceivePiece(msgspec.Struct, tag=True):
    """The other end of a pair has announced a piece of so many bytes. extent: where it goes; None = nowhere."""

    pair: int
    size: int
    checksum: int | None = None  # None = unknown, and not to be checked
    id: int = 0
    generation: int = 0
    extent: Extent | None = None


class OpenPair(msgspec.Struct, tag=True):
    """Connect to another engine's GPU, to send. The number is also that of the lane whose exports will go there."""

    pair: int


class JoinPair(msgspec.Struct, tag=True):
    """Connect to the GPU of the engine that opened a pair, to receive."""

    pair: int
    unique_id: bytes


class UsePair(msgspec.Struct, tag=True):
    """Both ends are up. check: whether pieces go with a checksum. credit: pieces that may be sent before the other end
    allows more; None = any number."""

    pair: int
    check: bool = True
    credit: int | None = None


class GrantPair(msgspec.Struct, tag=True):
    """The other end of a pair can receive so many further pieces."""

    pair: int
    pieces: int


class ClosePair(msgspec.Struct, tag=True):
    pair: int


class ImportTokens(msgspec.Struct, tag=True):
    id: int
    tokens: list[int]


class RestartImport(msgspec.Struct, tag=True):
    """One pod will not deliver, another may: reserve anew. Answered by a reservation, unless all is there by now."""

    id: int


class CancelImport(msgspec.Struct, tag=True):
    """Another pod will not deliver; compute here."""

    id: int


class FreeSlot(msgspec.Struct, tag=True):
    """An export slot has been read."""

    slot: int
    on_gpu: bool = False


class Ping(msgspec.Struct, tag=True):
    """Asks for a sign of life: an output with the load."""


Command = (
    Start | Add | Abort | ImportPiece | ImportTokens | RestartImport | CancelImport | FreeSlot | Ping
    | SendPiece | ReceivePiece | OpenPair | JoinPair | UsePair | GrantPair | ClosePair
)  # fmt: skip


class Progress(msgspec.Struct, tag=True):
    """How many parts of what the engine prepares are done, of how many."""

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
    gpu_pairs: int = 0  # that can be open at a time
    gpu_landing_slots: int = 0  # of each of them
    prefill_rate: float = 0.0  # tokens a second; 0 = not measured
    step_tokens: int = 0  # that it computes at a time; 0 = not told
    num_threads: int = 0  # that compute on CPU; 0 = a GPU computes
    threads_spin: bool = False  # while they wait
    max_num_seqs: int = 128  # choices of a request at most


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
    checksum: int | None = None  # of one on the GPU, if the pair wants it


class Imported(msgspec.Struct, array_like=True):
    """All KV of a reservation is there."""

    id: int
    generation: int


class PairId(msgspec.Struct, array_like=True):
    """The id under which the other end joins a pair that was opened here."""

    pair: int
    unique_id: bytes


class PairLost(msgspec.Struct, array_like=True):
    """A pair is closed, and what was on its way over it is lost."""

    pair: int
    reason: str


class Output(msgspec.Struct, tag=True, omit_defaults=True):
    """All that one turn of the engine loop has to say."""

    deltas: list[Delta] = []
    reservations: list[Reservation] = []
    rejections: list[Rejected] = []
    broken: list[int] = []  # requests that have ended because what the model computed for them is not finite
    pieces: list[Piece] = []
    freed_slots: list[int] = []  # of the import arena
    imported: list[Imported] = []
    stale: list[int] = []  # requests to which a piece came too late
    damaged: list[Imported] = []  # reservations to which a piece came from another GPU with a wrong checksum
    pair_ids: list[PairId] = []
    pairs_up: list[int] = []
    pairs_lost: list[PairLost] = []
    landed: list[int] = []  # pairs of which a slot is free again, once for each slot
    load: Load | None = None
    blocks_gained: list[int] = []  # keys of blocks that the prefix cache has since the last message
    blocks_lost: list[int] = []  # likewise, has no more


Event = Progress | Ready | Refused | Output
