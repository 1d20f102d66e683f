"""Decides how many prefill and decode pods a model needs. A pure policy: time comes with the load samples.

Scaling up follows the latency of requests: nine in ten should wait for prefill no longer than half the TTFT objective,
get their tokens within the TPOT objective, and find free KV blocks. Scaling down follows a forecast: the highest load
of the last minutes must fit on one pod less. Between the two limits nothing changes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import median

from baton_controller.config_file import RoleSpec, ScalerSpec
from baton_controller.counters import quantile, total
from baton_controller.load import Load

_QUANTILE = 0.9  # the objectives hold for this share of requests, pods or samples
_SCALE_UP_WINDOW_S = 60.0
_BUSY_WINDOW_S = 120.0  # the number of busy pods is averaged over this time
_SCALE_DOWN_WINDOW_S = 300.0  # as the default downscale stabilisation of a HorizontalPodAutoscaler
_RELAPSE = 4.0  # times the shrink delay: growth within this time after a step down shows that the step was wrong
_MAX_SHRINK_DELAY_S = 7200.0
_SETTLE_S = 30.0  # between two steps down
_START_S = 60.0  # until a new pod serves requests
_MIN_SAMPLES = 2
_MAX_GROWTH = 3.0  # times the live pods, in one step
_LATE_GROWTH = 2.0  # the largest growth that lateness alone justifies, however long the queue is
_DRAIN_S = 60.0  # a queue should be gone after this time
_WAIT_SHARE = 0.5  # of the TTFT objective that may be spent waiting; the rest is for the prefill itself
_SHORT_QUEUE = 0.5  # of a limit: a shorter queue does not justify another pod
_LIMIT_AFTER_SHRINK = 0.7  # of a limit: the forecast for one pod less must stay below
_KV_HIGH, _KV_TARGET, _KV_LOW = 0.85, 0.7, 0.5
_BUSY_TARGET = 0.7  # share of the time that a prefill pod should be busy
_SATURATED = 0.9
_TPOT_LOW = 0.8  # of the objective: the forecast for one pod less must stay below
_TPOT_OF_LOAD = 0.5  # assumed share of a decode step's time that grows with the number of its requests


@dataclass(frozen=True)
class Size:
    """The replicas that a role should have. why: the reason for a change; empty = no change."""

    replicas: int
    why: str = ""


@dataclass(frozen=True)
class Sizes:
    """The sizes of both roles."""

    prefill: Size
    decode: Size


@dataclass(frozen=True)
class _Demand:
    """The demand for pods of a role. pressure: above 1 there are too few pods. growth: needed pods divided by live
    pods. may_shrink: the load would fit on one pod less."""

    pressure: float
    growth: float
    may_shrink: bool
    why: str


@dataclass
class _ShrinkDelay:
    """The time after a role has grown in which it may not shrink. The delay doubles each time a step down proves to be
    wrong, so that a load between two sizes does not make the role oscillate between them."""

    seconds: float = _SCALE_DOWN_WINDOW_S
    grew_at: float = -inf
    shrank_at: float = -inf

    def note(self, now: float, before: int, after: int) -> None:
        if after < before:
            self.shrank_at = now
        elif after > before:
            relapse = now - self.shrank_at < _RELAPSE * self.seconds
            if relapse:
                self.seconds = min(2 * self.seconds, _MAX_SHRINK_DELAY_S)
            elif now - self.grew_at > _RELAPSE * self.seconds:
                self.seconds = _SCALE_DOWN_WINDOW_S
            self.shrank_at = -inf

    def over(self, now: float) -> bool:
        return now - self.grew_at >= self.seconds


class Scaling:
    """Decides the sizes of one model's roles. It keeps the recent load samples."""

    def __init__(self) -> None:
        self._loads: deque[Load] = deque()
        self._live = (0, 0)
        self._changed_at = -inf  # when the number of live pods last changed
        self._shrink_delays = (_ShrinkDelay(), _ShrinkDelay())

    def decide(self, load: Load, prefill: int, decode: int, spec: ScalerSpec, hold: bool = False) -> Sizes:
        """Return the new sizes. load: a new sample. prefill, decode: the current replicas. hold: forbids shrinking."""
        self._note(load)
        kept = Sizes(_bounded(prefill, spec.prefill), _bounded(decode, spec.decode))
        fresh = [past for past in self._loads if past.time >= max(self._changed_at, load.time - _SCALE_UP_WINDOW_S)]
        if not all(self._live) or len(fresh) < _MIN_SAMPLES:
            return kept
        decode_demand = self._decode_demand(fresh, spec)
        prefill_demand = self._prefill_demand(fresh, spec, decode_demand.pressure > 1)
        decode_demand = self._with_prefill(decode_demand, prefill_demand, fresh)
        demands = (prefill_demand, decode_demand)
        # While one role is too small, the other one sees less than the full load.
        calm = max(demand.pressure for demand in demands) <= 1 and not hold and self._settled(load.time)
        wanted = []
        for role, live, demand, size, shrink_delay in zip(
            (spec.prefill, spec.decode),
            self._live,
            demands,
            (kept.prefill, kept.decode),
            self._shrink_delays,
            strict=True,
        ):
            new = _grown(role, live, demand, size)
            if calm and shrink_delay.over(load.time):
                new = _shrunk(role, live, demand, size)
            shrink_delay.note(load.time, size.replicas, new.replicas)
            wanted.append(new)
        return Sizes(*wanted)

    def _note(self, load: Load) -> None:
        live = (len(load.queue_s), len(load.kv_use))
        if live != self._live:
            self._changed_at = load.time
            for role, (before, after) in enumerate(zip(self._live, live, strict=True)):
                if after > before:
                    self._shrink_delays[role].grew_at = load.time
            self._live = live
        self._loads.append(load)
        while self._loads[0].time < load.time - _SCALE_DOWN_WINDOW_S - _BUSY_WINDOW_S:
            self._loads.popleft()

    def _settled(self, now: float) -> bool:
        return now - self._loads[0].time >= _SCALE_DOWN_WINDOW_S and now - self._changed_at >= _SETTLE_S

    def _prefill_demand(self, fresh: list[Load], spec: ScalerSpec, decode_is_full: bool) -> _Demand:
        live = self._live[0]
        # The next request goes to the shortest queue. Use the median over pods, because a broken pod has no queue.
        queue = _p90(median(load.queue_s) for load in fresh)
        # When decode pods are full, requests wait in gateways for decode blocks; more prefill pods would not help them.
        rate = _served_per_s(fresh)
        waits = [_mean(load.queue_s) + (0.0 if decode_is_full else load.waiting / rate) for load in fresh]
        wait = queue + (0.0 if decode_is_full else _p90(load.waiting for load in fresh) / rate)
        limit = _WAIT_SHARE * spec.ttft_slo_seconds
        ttft = quantile(total(load.served for load in fresh).ttft, _QUANTILE) or 0.0
        # Without a queue, a late first token is due to its own long prompt, and more pods would not help.
        queueing = wait > _SHORT_QUEUE * limit
        pressure = max(wait / limit, ttft / spec.ttft_slo_seconds if queueing else 0.0)
        if _forecast(fresh, waits) <= _SHORT_QUEUE * limit:
            pressure = min(pressure, 1.0)  # the backlog will be gone before a new pod could help
        busy = self._busy_pods()
        fewer = max(live - 1, 1)
        calm = queue * _queueing_factor(busy / fewer) / _queueing_factor(busy / live) <= _LIMIT_AFTER_SHRINK * limit
        why = (
            f"p90 of the wait {wait:.2f} s (limit {limit:.2f}), of TTFT {ttft:.2f} s "
            f"(objective {spec.ttft_slo_seconds:g}), {busy:.1f} of {live} busy"
        )
        growth = busy / (_BUSY_TARGET * live)
        if self._saturated(fresh):
            growth = max(min(pressure, _LATE_GROWTH), 1 / _BUSY_TARGET + waits[-1] / _DRAIN_S)
        return _Demand(pressure, growth, live > 1 and calm and busy <= _BUSY_TARGET * fewer, why)

    def _busy_pods(self) -> float:
        """Return the highest average number of busy prefill pods in any busy window that ends within the scale-down
        window."""
        now = self._loads[-1].time
        counts = [(load.time, sum(seconds > 0 for seconds in load.queue_s)) for load in self._loads]
        most = 0.0
        for end, _ in counts:
            stretch = [count for time, count in counts if end - _BUSY_WINDOW_S < time <= end]
            if end > now - _SCALE_DOWN_WINDOW_S and len(stretch) >= _MIN_SAMPLES:
                most = max(most, sum(stretch) / len(stretch))
        return most

    def _saturated(self, fresh: list[Load]) -> bool:
        """Whether almost all prefill pods were busy in the last samples, so that their load hides the true demand."""
        samples = fresh[-_MIN_SAMPLES:]
        busy = sum(seconds > 0 for load in samples for seconds in load.queue_s)
        return busy >= _SATURATED * self._live[0] * len(samples)

    def _decode_demand(self, fresh: list[Load], spec: ScalerSpec) -> _Demand:
        live = self._live[1]
        fewer = max(live - 1, 1)
        kv_use = _p90(share for load in fresh for share in load.kv_use)
        requests = _p90(count for load in fresh for count in load.decoding)
        tpot = quantile(total(load.served for load in fresh).tpot, _QUANTILE) or 0.0
        slow = tpot / spec.tpot_slo_seconds if requests > 1 else 0.0
        pressure = max(kv_use / _KV_HIGH, slow)
        counts = [float(sum(load.decoding)) for load in fresh]
        if _forecast(fresh, counts) <= _SHORT_QUEUE * counts[-1]:
            pressure = min(pressure, 1.0)
        # Measured as a number of full pods, because the number of pods may have changed within the window.
        recent = [load for load in self._loads if load.time > self._loads[-1].time - _SCALE_DOWN_WINDOW_S]
        held = _p90(share * len(load.kv_use) for load in recent for share in load.kv_use)
        spread = _p90(float(count * len(load.kv_use)) for load in recent for count in load.decoding)
        slower = (quantile(total(load.served for load in recent).tpot, _QUANTILE) or 0.0) * (1 + _TPOT_OF_LOAD / fewer)
        calm = slower <= _TPOT_LOW * spec.tpot_slo_seconds or spread <= fewer
        why = (
            f"p90 of KV use {kv_use:.0%} (limit {_KV_HIGH:.0%}), of TPOT {tpot * 1e3:.1f} ms "
            f"(objective {spec.tpot_slo_seconds * 1e3:g}), {requests:.0f} requests a pod"
        )
        return _Demand(
            pressure,
            min(max(kv_use / _KV_TARGET, slow), _LATE_GROWTH),
            live > 1 and calm and held <= _KV_LOW * fewer,
            why,
        )

    def _with_prefill(self, decode: _Demand, prefill: _Demand, fresh: list[Load]) -> _Demand:
        """Return decode's demand with the load that will reach it when prefill, now the bottleneck, has grown."""
        if prefill.pressure <= 1 or not self._saturated(fresh):
            return decode
        more = min(prefill.growth, _LATE_GROWTH)
        kv_use = _p90(share for load in fresh for share in load.kv_use)
        # Requests that wait for prefill hold blocks too. So full blocks justify no more growth than prefill's own.
        return replace(
            decode,
            pressure=max(decode.pressure, kv_use / _KV_HIGH * more),
            growth=max(decode.growth, min(kv_use / _KV_TARGET, 1.0) * more),
            why=f"{decode.why}; prefill will deliver {more:.1f} times as much",
        )


def _bounded(replicas: int, role: RoleSpec) -> Size:
    bounded = min(max(replicas, role.min), role.max)
    return Size(bounded, "" if bounded == replicas else f"limited to {role.min} to {role.max} replicas")


def _grown(role: RoleSpec, live: int, demand: _Demand, size: Size) -> Size:
    if demand.pressure <= 1:
        return size
    wanted = min(ceil(live * min(max(demand.growth, 1 + 1 / live), _MAX_GROWTH)), role.max)
    return Size(wanted, demand.why) if wanted > size.replicas else size


def _shrunk(role: RoleSpec, live: int, demand: _Demand, size: Size) -> Size:
    # Take away one pod at a time, and none while other pods start or are down.
    if not demand.may_shrink or size.replicas != live or size.replicas <= role.min:
        return size
    return Size(size.replicas - 1, f"one pod less is enough: {demand.why}")


def _served_per_s(loads: list[Load]) -> float:
    """Return the requests served per second. Waiting requests divided by this rate are their wait (Little's law)."""
    served = sum(load.served.requests for load in loads[1:])
    return max(served, 1.0) / (loads[-1].time - loads[0].time)


def _forecast(loads: list[Load], values: list[float]) -> float:
    """Return a value extrapolated linearly to the time at which a pod started now would serve requests."""
    seconds = loads[-1].time - loads[0].time
    return values[-1] + (values[-1] - values[0]) / seconds * _START_S


def _queueing_factor(busy: float) -> float:
    """Return a factor proportional to the wait at a pod with this utilisation (M/G/1)."""
    busy = min(max(busy, 0.01), 0.99)
    return busy / (1 - busy)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _p90(values: Iterable[float]) -> float:
    """Return the 90th percentile; of 2 to 9 values the second largest, so that a single outlier has no effect."""
    found = sorted(values)
    return found[max(min(int(_QUANTILE * len(found)), len(found) - 2), 0)] if found else 0.0
