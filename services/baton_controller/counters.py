"""Gateways' counters of the requests of each revision, and their increase since an earlier reading."""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

MOST = 2.0**53  # up to this number a float holds every integer
Count = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
Buckets = dict[str, Count]  # a Prometheus histogram: observations up to each bound, by the label `le`


class Counters(msgspec.Struct, frozen=True):
    """The counters of one revision. ttft, tpot: seconds to the first token and per token after it."""

    ok: Count = 0.0
    error: Count = 0.0
    ttft: Buckets = {}
    tpot: Buckets = {}

    @property
    def requests(self) -> float:
        return self.ok + self.error

    @property
    def error_rate(self) -> float:
        return self.error / self.requests if self.requests else 0.0

    def minus(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.ok - earlier.ok,
            self.error - earlier.error,
            {le: count - earlier.ttft.get(le, 0.0) for le, count in self.ttft.items()},
            {le: count - earlier.tpot.get(le, 0.0) for le, count in self.tpot.items()},
        )

    def fell(self, earlier: "Counters") -> bool:
        """Whether any counter is smaller than in `earlier`, which only a restart of its process can cause."""
        change = self.minus(earlier)
        return min(change.ok, change.error, *change.ttft.values(), *change.tpot.values()) < 0


class Reading(msgspec.Struct, frozen=True):
    """One gateway's counters of one model. started: when they began, by the gateway's clock; 0 = unknown."""

    started: float = 0.0
    revisions: dict[str, Counters] = {}

    def restarted_since(self, earlier: "Reading") -> bool:
        if self.started and earlier.started and self.started != earlier.started:
            return True
        # Counters of a revision disappear only when the gateway's process restarts.
        return any(self.revisions.get(name, NOTHING).fell(was) for name, was in earlier.revisions.items())


NOTHING = Counters()
Readings = Mapping[str, Reading]  # by gateway


def extended(start: Readings, now: Readings) -> dict[str, Reading]:
    """Return the readings at an interval's start, completed for gateways that are new or have restarted since.

    A restarted gateway starts from zero. A new gateway starts from its reading in `now`, because some of its counts
    may be from before the interval.
    """
    result = {**now, **start}
    for name, reading in now.items():
        if name in start and reading.restarted_since(start[name]):
            result[name] = Reading(reading.started)
    return result


def window(start: Readings, now: Readings, revision: str) -> Counters:
    """Return the increase of a revision's counters over all gateways. start: as `extended` returns it for `now`."""
    changes = []
    for name, reading in now.items():
        counters = reading.revisions.get(revision, NOTHING)
        changes.append(counters.minus(start[name].revisions.get(revision, NOTHING)))
    return total(changes)


def arrived(before: Readings, now: Readings, revision: str) -> Counters:
    """Return the increase of a revision's counters over all gateways between two readings of each gateway."""
    return window(extended(before, now), now, revision)


def total(parts: Iterable[Counters]) -> Counters:
    ok = error = 0.0
    ttft: Buckets = {}
    tpot: Buckets = {}
    for part in parts:
        ok += part.ok
        error += part.error
        for into, buckets in ((ttft, part.ttft), (tpot, part.tpot)):
            for le, count in buckets.items():
                into[le] = into.get(le, 0.0) + count
    return Counters(ok, error, ttft, tpot)


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return the quantile `share` of a histogram, linearly interpolated within its bucket; None without observations.

    Like Prometheus' histogram_quantile, it treats values beyond the last finite bound as equal to that bound.
    """
    bounds = sorted((float(le), count) for le, count in buckets.items())
    if not bounds or bounds[-1][1] <= 0:
        return None
    rank = share * bounds[-1][1]
    below, before = 0.0, 0.0
    for bound, count in bounds:
        if count >= rank:
            if bound == float("inf"):
                return below
            return below + (bound - below) * (rank - before) / max(count - before, 1e-9)
        below, before = bound, count
    return below
