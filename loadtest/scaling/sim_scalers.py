"""The scalers of simulated pods: the controller's policy, a fixed number, or a HorizontalPodAutoscaler."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from baton_controller.config_file import RoleSpec, ScalerSpec
from baton_controller.load import Load
from baton_controller.scaling import Scaling


@dataclass(frozen=True)
class Sizes:
    """The numbers of replicas that a scaler asks for."""

    prefill: int
    decode: int


@dataclass(frozen=True)
class View:
    """The input of one evaluation. busy: by role, the share of time that each live pod worked since the last one."""

    load: Load
    sizes: Sizes
    busy: tuple[Sequence[float], Sequence[float]]


class Scaler(Protocol):
    first: Sizes

    def look(self, view: View) -> Sizes: ...


class Fixed:
    """Keeps the number of pods fixed."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.first = Sizes(prefill, decode)

    def look(self, view: View) -> Sizes:
        return self.first


class Controller:
    """The policy that `baton controller` runs."""

    def __init__(self, first: Sizes, most: int, ttft_slo_s: float, tpot_slo_s: float) -> None:
        self.first = first
        self._policy = Scaling()
        role = RoleSpec(deployment="any", max=most)
        self._spec = ScalerSpec(prefill=role, decode=role, ttft_slo_seconds=ttft_slo_s, tpot_slo_seconds=tpot_slo_s)

    def look(self, view: View) -> Sizes:
        sizes = self._policy.decide(view.load, view.sizes.prefill, view.sizes.decode, self._spec)
        return Sizes(sizes.prefill.replicas, sizes.decode.replicas)


class Hpa:
    """A HorizontalPodAutoscaler for each role on the share of the time that pods work, with Kubernetes' defaults.

    Formula, tolerance, pods that start and the stabilisation window:
    https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/
    """

    def __init__(self, first: Sizes, most: int, target: float = 0.7) -> None:
        self.first = first
        self._roles = _HpaRole(most, target), _HpaRole(most, target)

    def look(self, view: View) -> Sizes:
        prefill, decode = self._roles
        now = view.load.time
        return Sizes(
            prefill.size(now, view.sizes.prefill, view.busy[0]), decode.size(now, view.sizes.decode, view.busy[1])
        )


class _HpaRole:
    _TOLERANCE = 0.1
    _STABLE_S = 300.0

    def __init__(self, most: int, target: float) -> None:
        self._most = most
        self._target = target
        self._recommendations: deque[tuple[float, int]] = deque()

    def size(self, now: float, replicas: int, busy: Sequence[float]) -> int:
        recommended = self._recommend(replicas, busy)
        self._recommendations.append((now, recommended))
        while self._recommendations[0][0] < now - self._STABLE_S:
            self._recommendations.popleft()
        least = max(recommended for _, recommended in self._recommendations)
        return recommended if recommended > replicas else min(replicas, least)

    def _recommend(self, replicas: int, busy: Sequence[float]) -> int:
        if not busy:
            return replicas
        ratio, pods = sum(busy) / len(busy) / self._target, len(busy)
        if ratio > 1 and replicas > pods:
            # On scaling up, the HPA counts starting pods as idle.
            ratio, pods = sum(busy) / replicas / self._target, replicas
            if ratio < 1:
                return replicas
        if abs(ratio - 1) <= self._TOLERANCE:
            return replicas
        return min(max(ceil(ratio * pods), 1), self._most, max(2 * replicas, replicas + 4))
