"""The engine's commands to the ranks about pairs of pods that are connected from GPU to GPU, and the ranks' reports.

All ranks get all commands in one order, so both ends of each connection have its transfers in the same order. The
number of a pair is that of the command that opened it.
"""

import msgspec

from baton_common.extent import Extent
from baton_engine.executor import StepMark


class OpenLinks(msgspec.Struct, tag=True):
    """Connect the rank to the ranks of another pod with which it shares parts of the KV.

    ranks: of the other pod. unique_ids: one for each part. slots: those that the pair uses, of slot_bytes for the KV of
    all ranks together.
    """

    number: int
    sends: bool
    ranks: int
    unique_ids: list[bytes]
    slots: list[int]
    slot_bytes: int


class CloseLinks(msgspec.Struct, tag=True):
    """End a pair. The operation is over when none of its transfers is running any more."""

    number: int
    pair: int


class PackParts(msgspec.Struct, tag=True):
    """Copy the rank's parts of an extent into a slot. tables: as in KvCache.gather. check: compute their checksums.

    behind: where in the rank's work the KV is complete; None = it is complete now.
    """

    number: int
    pair: int
    slot: int
    tables: list[list[int]]
    extent: Extent
    check: bool
    behind: StepMark | None


class SendParts(msgspec.Struct, tag=True):
    """Send the rank's parts of an extent from a slot."""

    number: int
    pair: int
    slot: int
    extent: Extent


class ReceiveParts(msgspec.Struct, tag=True):
    """Receive the rank's parts of an extent into a slot. check: compute their checksums."""

    number: int
    pair: int
    slot: int
    extent: Extent
    check: bool


class UnpackParts(msgspec.Struct, tag=True):
    """Copy the rank's parts of an extent from a slot into its cache.

    behind: where in the rank's work the blocks are free for it; None = they are free now.
    """

    number: int
    pair: int
    slot: int
    tables: list[list[int]]
    extent: Extent
    behind: StepMark | None


PairCommand = OpenLinks | CloseLinks | PackParts | SendParts | ReceiveParts | UnpackParts


class Done(msgspec.Struct, tag=True):
    """A rank's part in an operation is over. sums: the checksums by part."""

    number: int
    succeeded: bool
    sums: dict[int, int]


class LinksUp(msgspec.Struct, tag=True):
    """All connections of the rank for a pair are up."""

    pair: int


class LinksLost(msgspec.Struct, tag=True):
    """A connection of the rank for a pair is lost."""

    pair: int
    reason: str


Report = Done | LinksUp | LinksLost
