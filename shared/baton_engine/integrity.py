"""Checks the counters of an idle engine against the objects that they count."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from .block_allocator import BlockAllocator
from .scheduler import Scheduler
from .sequence import Sequence


def check_integrity(
    allocator: BlockAllocator,
    scheduler: Scheduler,
    requests: Mapping[int, list[Sequence]],
    tables: Mapping[str, AbstractSet[int]],
) -> None:
    """Raise RuntimeError on the first difference.

    requests: the sequences of each request, by its id. tables: the request ids in other tables, by the kind of entry.
    """
    sequences = [sequence for group in requests.values() for sequence in group]
    allocator.check_integrity(sequences)
    known = {id(sequence) for sequence in sequences}
    for sequence in (*scheduler.running, *scheduler.importing, *scheduler.waiting):
        if id(sequence) not in known:
            raise RuntimeError(f"request {sequence.request.id} is scheduled but has ended")
    scheduler.check_integrity()
    for name, ids in tables.items():
        stray = ids - requests.keys()
        if stray:
            raise RuntimeError(f"request {min(stray)} has an {name} but has ended")
