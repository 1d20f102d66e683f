"""Checks the counters of an idle engine against the objects that they count."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from .block_pool import BlockPool
from .scheduler import Scheduler
from .sequence import Sequence


def check_integrity(
    pool: BlockPool,
    scheduler: Scheduler,
    requests: Mapping[int, list[Sequence]],
    tables: Mapping[str, AbstractSet[int]],
) -> None:
    """Raise RuntimeError on the first difference.

    requests: the sequences of each request, by its id. tables: the request ids in other tables, by the kind of entry.
    """
    sequences = [sequence for group in requests.values() for sequence in group]
    holders = Counter(sequence.shared for sequence in sequences if sequence.shared is not None)
    if any(shared.holders != count for shared, count in holders.items()):
        raise RuntimeError("a count of the sequences that share blocks is wrong")
    together = {sequence.shared: sequence.blocks[: sequence.shared.count] for sequence in sequences if sequence.shared}
    own = [sequence.blocks[sequence.shared.count if sequence.shared else 0 :] for sequence in sequences]
    pool.check_integrity([*together.values(), *own])
    known = {id(sequence) for sequence in sequences}
    for sequence in (*scheduler.running, *scheduler.importing, *scheduler.waiting):
        if id(sequence) not in known:
            raise RuntimeError(f"request {sequence.request.id} is scheduled but has ended")
    if scheduler.imports_waiting != sum(s.request.imports_kv for s in scheduler.waiting):
        raise RuntimeError("the scheduler's count of waiting imports is wrong")
    if scheduler.export_blocks != sum(len(sequence.blocks) for sequence in sequences if sequence.exports):
        raise RuntimeError("the scheduler's count of the blocks of exports is wrong")
    for name, ids in tables.items():
        stray = ids - requests.keys()
        if stray:
            raise RuntimeError(f"request {min(stray)} has an {name} but has ended")
