"""Which faults happen, in which order and when: all from one seed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from .faults import (
    ClientsLeft,
    ConnectionsAbandoned,
    ConnectionsCut,
    ConnectionsFrozen,
    Drained,
    EngineKilled,
    Fault,
    Killed,
    LeasesExpired,
    LinkCut,
    LinkCutBetweenLegs,
    LinkHeld,
    LinkSilent,
    LogDiskFull,
    NoWorkerReached,
    PiecesDamaged,
    Restarted,
    Stopped,
)
from .tampering import Damage

Make = Callable[[random.Random], Fault]

# A worker's start takes seconds of a core, so only every so many scenarios ends one.
_RESTART_EVERY = 11
_PAUSE_S = 0.35, 0.6

_RESTARTS: list[Make] = [
    partial(kind, role=role)
    for kind in (Killed, EngineKilled, Restarted, Drained, LogDiskFull)
    for role in ("prefill", "decode")
]
_OTHERS: dict[Make, int] = {  # with how often each comes in a round
    **{partial(PiecesDamaged, damage=damage): 4 for damage in Damage},
    partial(Stopped, role="prefill"): 3,
    partial(Stopped, role="decode"): 3,
    partial(ConnectionsFrozen, role="prefill"): 2,
    partial(ConnectionsFrozen, role="decode"): 2,
    partial(ConnectionsCut, role="prefill"): 2,
    partial(ConnectionsCut, role="decode"): 2,
    partial(ConnectionsAbandoned, role="prefill"): 1,
    partial(ConnectionsAbandoned, role="decode"): 1,
    LinkCut: 3,
    LinkCutBetweenLegs: 3,
    LinkHeld: 2,
    NoWorkerReached: 1,
    LeasesExpired: 2,
    LinkSilent: 1,
    ClientsLeft: 3,
}


@dataclass(frozen=True)
class Scenario:
    """pause_s: after the start of the scenario before."""

    number: int
    fault: Fault
    pause_s: float

    def __str__(self) -> str:
        return f"scenario {self.number}: {self.fault}"


def make_plan(seed: int, count: int) -> list[Scenario]:
    rng = random.Random(seed)
    restarts = _in_rounds(rng, _RESTARTS)
    others = _in_rounds(rng, [make for make, times in _OTHERS.items() for _ in range(times)])
    return [
        Scenario(number, next(others if number % _RESTART_EVERY else restarts)(rng), rng.uniform(*_PAUSE_S))
        for number in range(1, count + 1)
    ]


def _in_rounds(rng: random.Random, kinds: list[Make]) -> Iterator[Make]:
    """Yield all in some order, then all in another one, and so on."""
    while True:
        yield from rng.sample(kinds, len(kinds))
