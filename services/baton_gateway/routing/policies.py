"""Ways to choose the pods of a request. A policy sees only pods that may serve the request."""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .demand import Demand
from .pods import Pod

MAX_PREFILLS = 3  # prefill pods that are tried for a request, one after another

PolicyName = Literal["kv_aware", "least_loaded", "round_robin", "random"]
# Why a prompt is computed on its pod: the predicted TTFT is the lowest there, most of the prompt is cached there, there
# is no prefill pod, or the policy considers neither time nor cache.
Reason = Literal["least_ttft", "cached", "no_prefill_pods", "policy"]


@dataclass(frozen=True, slots=True)
class Group:
    """The pods of one revision: at least one decode pod, and any number of prefill pods."""

    decodes: list[Pod]
    prefills: list[Pod]


@dataclass(frozen=True, slots=True)
class PodChoice:
    """prefills: in the order in which they are to be tried; none = the decode pod prefills.

    num_cached: tokens of the prompt that the pod which prefills is known to have cached. price: the predicted TTFT plus
    the delay of other requests, in seconds; 0 = not predicted.
    """

    decode: Pod
    prefills: Sequence[Pod]
    reason: Reason
    num_cached: int = 0
    price: float = 0.0


class Policy(Protocol):
    def choose(self, demand: Demand, groups: Sequence[Group]) -> PodChoice:
        """Choose pods from these groups, without charging them. There is at least one group."""
        ...


class LeastLoaded:
    """Chooses the decode pod with the fewest requests, and of its group the prefill pods with the fewest tokens."""

    def choose(self, demand: Demand, groups: Sequence[Group]) -> PodChoice:
        decode, group = min(_decodes(groups), key=lambda pair: (pair[0].requests.load, pair[0].dispatched))
        prefills = heapq.nsmallest(
            MAX_PREFILLS, group.prefills, key=lambda pod: (pod.prefill_tokens.load, pod.dispatched)
        )
        return PodChoice(decode, prefills, _reason(group))


class RoundRobin:
    """Chooses one pod after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, demand: Demand, groups: Sequence[Group]) -> PodChoice:
        decodes = _decodes(groups)
        decode, group = decodes[self._turn % len(decodes)]
        count = len(group.prefills)
        prefills = [group.prefills[(self._turn + i) % count] for i in range(min(MAX_PREFILLS, count))]
        self._turn += 1
        return PodChoice(decode, prefills, _reason(group))


class Random:
    """Chooses every pod with equal probability."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, demand: Demand, groups: Sequence[Group]) -> PodChoice:
        decode, group = self._random.choice(_decodes(groups))
        prefills = self._random.sample(group.prefills, min(MAX_PREFILLS, len(group.prefills)))
        return PodChoice(decode, prefills, _reason(group))


def _decodes(groups: Sequence[Group]) -> list[tuple[Pod, Group]]:
    return [(decode, group) for group in groups for decode in group.decodes]


def _reason(group: Group) -> Reason:
    return "policy" if group.prefills else "no_prefill_pods"
