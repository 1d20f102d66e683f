"""How many prefill and decode pods a model needs. A pure policy: it knows what it was told, and no clock.

Up goes by what requests meet: nine in ten should wait for prefill no longer than half the TTFT objective, have their
tokens within the TPOT objective, and find KV blocks. Down goes by what the load would do to one pod less, judged by the
worst of some minutes. Between the two limits nothing changes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import median

from baton_controller.config_file import RoleSpec, ScalerSpec
from baton_controller.counters import quantile, total
from baton_controller.load import Load

_SHARE = 0.9  # of the requests, pods or looks that are to be well
_FAST_S = 60.0  # what counts for more pods
_LOAD_S = 120.0  # over which pods are counted as busy
_SLOW_S = 300.0  # what counts for fewer: the down-stabilisation of a HorizontalPodAutoscaler
_RELAPSE = 4.0  # times the patience, within which growing again means that a pod too many was taken away
_MOST_PATIENCE_S = 7200.0
_SETTLE_S = 30.0  # between two steps down
_START_S = 60.0  # that a new pod takes until it helps
_LEAST_LOOKS = 2
_MOST_GROWTH = 3.0  # times the live pods, in one step
_LATE_GROWTH = 2.0  # the most for being late alone, whatever has piled up
_DRAIN_S = 60.0  # in which that is to be gone
_WAIT_SHARE = 0.5  # of the TTFT objective, for waiting; the rest is for the prompt itself
_CALM = 0.5  # of a limit: what is no queue worth a pod
_FEWER = 0.7  # of a limit: where one pod less may end up
_KV_HIGH, _KV_TARGET, _KV_LOW = 0.85, 0.7, 0.5
_BUSY_TARGET = 0.7  # share of the time that a prefill pod is to have something to do
_SATURATED = 0.9
_TPOT_LOW = 0.8  # of the objective, with one pod less
_TPOT_OF_LOAD = 0.5  # share of a decode step that is taken to grow with its requests


@dataclass(frozen=True)
class Size:
    """Replicas of a role, and why they are to change; empty = they are not."""

    replicas: int
    why: str = ""


@dataclass(frozen=True)
class Sizes:
    """Of both roles."""

    prefill: Size
    decode: Size


@dataclass(frozen=True)
class _Wish:
    """What a role's load says. pressure: above 1 there are too few pods; growth: times so many pods are needed."""

    pressure: float
    growth: float
    may_shrink: bool
    why: str


@dataclass
class _Patience:
    """How long after a role has grown none of its pods is taken away: longer each time that proves to be wrong, so that
    a load between two sizes does not go to and fro between them."""

    seconds: float = _SLOW_S
    grew_at: float = -inf
    shrank_at: float = -inf

    def note(self, now: float, before: int, after: int) -> None:
        if after < before:
            self.shrank_at = now
        elif after > before:
            relapse = now - self.shrank_at < _RELAPSE * self.seconds
            if relapse:
                self.seconds = min(2 * self.seconds, _MOST_PATIENCE_S)
            elif now - self.grew_at > _RELAPSE * self.seconds:
                self.seconds = _SLOW_S
            self.shrank_at = -inf

    def over(self, now: float) -> bool:
        return now - self.grew_at >= self.seconds


class Scaling:
    """Sizes the pods of one model, look by look."""

    def __init__(self) -> None:
        self._loads: deque[Load] = deque()
        self._live = (0, 0)
        self._changed_at = -inf  # the live pods are others since
        self._patience = (_Patience(), _Patience())

    def decide(self, load: Load, prefill: int, decode: int, spec: ScalerSpec, hold: bool = False) -> Sizes:
        """Return the sizes from now on. prefill, decode: replicas there are to be so far. hold: none is taken away."""
        self._note(load)
        kept = Sizes(_bounded(prefill, spec.prefill), _bounded(decode, spec.decode))
        fresh = [past for past in self._loads if past.time >= max(self._changed_at, load.time - _FAST_S)]
        if not all(self._live) or len(fresh) < _LEAST_LOOKS:
            return kept
        decode_wish = self._decode_wish(fresh, spec)
        prefill_wish = self._prefill_wish(fresh, spec, decode_wish.pressure > 1)
        decode_wish = self._with_prefill(decode_wish, prefill_wish, fresh)
        wishes = (prefill_wish, decode_wish)
        # While one role is too small the other sees less load than there is.
        calm = max(wish.pressure for wish in wishes) <= 1 and not hold and self._settled(load.time)
        wanted = []
        for role, live, wish, size, patience in zip(
            (spec.prefill, spec.decode), self._live, wishes, (kept.prefill, kept.decode), self._patience, strict=True
        ):
            new = _grown(role, live, wish, size)
            if calm and patience.over(load.time):
                new = _shrunk(role, live, wish, size)
            patience.note(load.time, size.replicas, new.replicas)
            wanted.append(new)
        return Sizes(*wanted)

    def _note(self, load: Load) -> None:
        live = (len(load.queue_s), len(load.kv_use))
        if live != self._live:
            self._changed_at = load.time
            for role, (before, after) in enumerate(zip(self._live, live, strict=True)):
                if after > before:
                    self._patience[role].grew_at = load.time
            self._live = live
        self._loads.append(load)
        while self._loads[0].time < load.time - _SLOW_S - _LOAD_S:
            self._loads.popleft()

    def _settled(self, now: float) -> bool:
        return now - self._loads[0].time >= _SLOW_S and now - self._changed_at >= _SETTLE_S

    def _prefill_wish(self, fresh: list[Load], spec: ScalerSpec, decode_is_full: bool) -> _Wish:
        live = self._live[0]
        # Who comes next goes where least is queued. The median of the pods, as one that is out of order has no queue.
        queue = _p90(median(load.queue_s) for load in fresh)
        # Requests also wait in gateways because no decode pod has blocks for them.
        rate = _served_per_s(fresh)
        waits = [_mean(load.queue_s) + (0.0 if decode_is_full else load.waiting / rate) for load in fresh]
        wait = queue + (0.0 if decode_is_full else _p90(load.waiting for load in fresh) / rate)
        limit = _WAIT_SHARE * spec.ttft_slo_seconds
        ttft = quantile(total(load.served for load in fresh).ttft, _SHARE) or 0.0
        # A first token that is late without a queue is late because of its own prompt: no pod helps that.
        queueing = wait > _CALM * limit
        pressure = max(wait / limit, ttft / spec.ttft_slo_seconds if queueing else 0.0)
        if _ahead(fresh, waits) <= _CALM * limit:
            pressure = min(pressure, 1.0)  # what piled up before is gone until another pod would help
        busy = self._busy_pods()
        fewer = max(live - 1, 1)
        calm = queue * _queueing_factor(busy / fewer) / _queueing_factor(busy / live) <= _FEWER * limit
        why = (
            f"p90 of the wait {wait:.2f} s (limit {limit:.2f}), of TTFT {ttft:.2f} s "
            f"(objective {spec.ttft_slo_seconds:g}), {busy:.1f} of {live} busy"
        )
        growth = busy / (_BUSY_TARGET * live)
        if self._saturated(fresh):
            growth = max(min(pressure, _LATE_GROWTH), 1 / _BUSY_TARGET + waits[-1] / _DRAIN_S)
        return _Wish(pressure, growth, live > 1 and calm and busy <= _BUSY_TARGET * fewer, why)

    def _busy_pods(self) -> float:
        """Return how many prefill pods have been busy on average, in the busiest stretch of those that count."""
        now = self._loads[-1].time
        counts = [(load.time, sum(seconds > 0 for seconds in load.queue_s)) for load in self._loads]
        most = 0.0
        for end, _ in counts:
            stretch = [count for time, count in counts if end - _LOAD_S < time <= end]
            if end > now - _SLOW_S and len(stretch) >= _LEAST_LOOKS:
                most = max(most, sum(stretch) / len(stretch))
        return most

    def _saturated(self, fresh: list[Load]) -> bool:
        """Whether prefill pods have all been busy lately: how much more there is to do cannot be seen then."""
        looks = fresh[-_LEAST_LOOKS:]
        busy = sum(seconds > 0 for load in looks for seconds in load.queue_s)
        return busy >= _SATURATED * self._live[0] * len(looks)

    def _decode_wish(self, fresh: list[Load], spec: ScalerSpec) -> _Wish:
        live = self._live[1]
        fewer = max(live - 1, 1)
        kv_use = _p90(share for load in fresh for share in load.kv_use)
        requests = _p90(count for load in fresh for count in load.decoding)
        tpot = quantile(total(load.served for load in fresh).tpot, _SHARE) or 0.0
        slow = tpot / spec.tpot_slo_seconds if requests > 1 else 0.0
        pressure = max(kv_use / _KV_HIGH, slow)
        counts = [float(sum(load.decoding)) for load in fresh]
        if _ahead(fresh, counts) <= _CALM * counts[-1]:
            pressure = min(pressure, 1.0)
        # In pods' worth, as there may have been more pods or fewer.
        recent = [load for load in self._loads if load.time > self._loads[-1].time - _SLOW_S]
        held = _p90(share * len(load.kv_use) for load in recent for share in load.kv_use)
        spread = _p90(float(count * len(load.kv_use)) for load in recent for count in load.decoding)
        slower = (quantile(total(load.served for load in recent).tpot, _SHARE) or 0.0) * (1 + _TPOT_OF_LOAD / fewer)
        calm = slower <= _TPOT_LOW * spec.tpot_slo_seconds or spread <= fewer
        why = (
            f"p90 of KV use {kv_use:.0%} (limit {_KV_HIGH:.0%}), of TPOT {tpot * 1e3:.1f} ms "
            f"(objective {spec.tpot_slo_seconds * 1e3:g}), {requests:.0f} requests a pod"
        )
        return _Wish(
            pressure,
            min(max(kv_use / _KV_TARGET, slow), _LATE_GROWTH),
            live > 1 and calm and held <= _KV_LOW * fewer,
            why,
        )

    def _with_prefill(self, decode: _Wish, prefill: _Wish, fresh: list[Load]) -> _Wish:
        """Return decode's wish for what comes to it once a prefill that holds it back has grown."""
        if prefill.pressure <= 1 or not self._saturated(fresh):
            return decode
        more = min(prefill.growth, _LATE_GROWTH)
        kv_use = _p90(share for load in fresh for share in load.kv_use)
        # Blocks are also held by requests that wait for prefill, so that full ones ask for no more than prefill does.
        return replace(
            decode,
            pressure=max(decode.pressure, kv_use / _KV_HIGH * more),
            growth=max(decode.growth, min(kv_use / _KV_TARGET, 1.0) * more),
            why=f"{decode.why}; prefill is to deliver {more:.1f} times as much",
        )


def _bounded(replicas: int, role: RoleSpec) -> Size:
    bounded = min(max(replicas, role.min), role.max)
    return Size(bounded, "" if bounded == replicas else f"between {role.min} and {role.max} there may be")


def _grown(role: RoleSpec, live: int, wish: _Wish, size: Size) -> Size:
    if wish.pressure <= 1:
        return size
    wanted = min(ceil(live * min(max(wish.growth, 1 + 1 / live), _MOST_GROWTH)), role.max)
    return Size(wanted, wish.why) if wanted > size.replicas else size


def _shrunk(role: RoleSpec, live: int, wish: _Wish, size: Size) -> Size:
    # One at a time, and none while others start, or are down.
    if not wish.may_shrink or size.replicas != live or size.replicas <= role.min:
        return size
    return Size(size.replicas - 1, f"one pod less is enough: {wish.why}")


def _served_per_s(loads: list[Load]) -> float:
    """Return how fast requests are served; with those that wait it tells for how long (Little's law)."""
    served = sum(load.served.requests for load in loads[1:])
    return max(served, 1.0) / (loads[-1].time - loads[0].time)


def _ahead(loads: list[Load], values: list[float]) -> float:
    """Return what a value will be when a pod that is ordered now helps, if it goes on changing as it does."""
    seconds = loads[-1].time - loads[0].time
    return values[-1] + (values[-1] - values[0]) / seconds * _START_S


def _queueing_factor(busy: float) -> float:
    """Return what the wait at a pod that is busy for such a share of the time is proportional to (M/G/1)."""
    busy = min(max(busy, 0.01), 0.99)
    return busy / (1 - busy)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _p90(values: Iterable[float]) -> float:
    """Return what nine in ten are not above; of fewer than ten the second largest, as one look proves nothing."""
    found = sorted(values)
    return found[max(min(int(_SHARE * len(found)), len(found) - 2), 0)] if found else 0.0
