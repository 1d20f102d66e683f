"""The routing policy that predicts the TTFT on each pod from its load and its cached blocks."""

import heapq
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .cost import CostModel
from .demand import Demand
from .pods import Pod
from .policies import MAX_PREFILLS, Group, PodChoice, Reason
from .prefix_index import PrefixIndex

TICK_S = 0.001  # predictions that differ by less count as equal
CACHED_SHARE = 0.8  # a pod that has this share of a prompt cached is preferred for it


class _PrefillCandidate(NamedTuple):
    """A prefill pod that may be chosen, its predicted time, and how many tokens of the prompt it has cached."""

    seconds: float
    slot: int  # makes candidates with equal times comparable
    pod: Pod
    cached: int  # tokens


class _DecodeCandidate(NamedTuple):
    """A decode pod that may be chosen.

    after_prefill: seconds that it adds after another pod's prefill. alone: the price if it prefills by itself.
    """

    after_prefill: float
    alone: float  # infinite if it may not
    pod: Pod
    cached: int


class _Pair(NamedTuple):
    """A decode pod, and the prefill pods in the order in which they are tried. Without any, the decode pod prefills."""

    price: float
    decode: _DecodeCandidate
    prefills: Sequence[_PrefillCandidate]
    reason: Reason


class KvAware:
    """Chooses the pair of pods with the lowest price: the predicted TTFT, and the delay that other requests suffer.

    A prompt stays on pods that have most of it cached unless their price is more than (1 + stay_margin) times the
    lowest. Otherwise small differences in load would spread a prefix over all pods.
    """

    def __init__(
        self, index: PrefixIndex, costs: CostModel | None = None, stay_margin: float = 0.5, local_prefill: bool = True
    ) -> None:
        """local_prefill: whether a decode pod may prefill although there are prefill pods."""
        self._index = index
        self._costs = costs or CostModel()
        self._stay_margin = stay_margin
        self._local_prefill = local_prefill

    def choose(self, demand: Demand, groups: Sequence[Group]) -> PodChoice:
        cached = self._cached(demand, groups)
        tie = _tie_breaker(demand.session)
        mostly_cached = CACHED_SHARE * demand.num_tokens
        pairs: list[_Pair] = []
        staying: list[_Pair] = []
        for group in groups:
            prefills = self._prefill_candidates(demand, group.prefills, cached)
            best = _best_prefills(prefills, tie)
            price = self._costs.price(best[0].pod) if best else 1.0
            decodes = self._decode_candidates(demand, group, cached)
            pairs.append(_best_pair(decodes, best, price, tie, "least_ttft"))
            holding = _best_prefills([each for each in prefills if each.cached >= mostly_cached], tie)
            holders = [each for each in decodes if each.cached >= mostly_cached]
            if holding or holders:
                others = [each for each in best if each not in holding]
                first = [*holding, *others][:MAX_PREFILLS]
                staying.append(_best_pair(holders or decodes, first, price, tie, "cached"))
            if best:
                best[0].pod.note_arrival()
        chosen = min(pairs, key=_price)
        if staying:
            stay = min(staying, key=_price)
            chosen = stay if stay.price <= chosen.price * (1 + self._stay_margin) else chosen
        chosen.decode.pod.note_arrival()
        known = chosen.prefills[0].cached if chosen.prefills else chosen.decode.cached
        order = [each.pod for each in chosen.prefills]
        return PodChoice(chosen.decode.pod, order, chosen.reason, known, chosen.price)

    def _cached(self, demand: Demand, groups: Sequence[Group]) -> dict[int, int]:
        """Return by slot how many tokens of the prompt a pod has cached. Pods with none are left out."""
        sizes = {pod.block_size for group in groups for pods in (group.decodes, group.prefills) for pod in pods} - {0}
        return {slot: blocks * size for size in sizes for slot, blocks in self._index.match(demand.keys(size)).items()}

    def _prefill_candidates(
        self, demand: Demand, pods: Iterable[Pod], cached: dict[int, int]
    ) -> list[_PrefillCandidate]:
        candidates, prefill, num_tokens = [], self._costs.prefill, demand.num_tokens
        for pod in pods:
            known = cached.get(pod.slot, 0)
            candidates.append(_PrefillCandidate(prefill(pod, num_tokens - known, known), pod.slot, pod, known))
        return candidates

    def _decode_candidates(self, demand: Demand, group: Group, cached: dict[int, int]) -> list[_DecodeCandidate]:
        candidates, costs, num_tokens = [], self._costs, demand.num_tokens
        for pod in group.decodes:
            known = cached.get(pod.slot, 0)
            missing = num_tokens - known
            wait = costs.decode_wait(pod, missing)
            if not group.prefills:
                alone: float | None = costs.prefill(pod, missing, known)
            else:
                alone = costs.local_prefill(pod, missing, known) if self._local_prefill else None
            candidates.append(
                _DecodeCandidate(
                    wait + costs.transfer(pod, missing), math.inf if alone is None else wait + alone, pod, known
                )
            )
        return candidates


def _best_prefills(candidates: Sequence[_PrefillCandidate], tie: Callable[[Pod], int]) -> list[_PrefillCandidate]:
    """Return the best prefill pod, and the next ones."""
    few = heapq.nsmallest(MAX_PREFILLS, candidates)
    if not few:
        return []
    limit = few[0].seconds + TICK_S
    first = min([each for each in candidates if each.seconds < limit], key=lambda each: (tie(each.pod), each.slot))
    return [first, *(each for each in few if each is not first)][:MAX_PREFILLS]


def _best_pair(
    decodes: Sequence[_DecodeCandidate],
    prefills: Sequence[_PrefillCandidate],
    price: float,
    tie: Callable[[Pod], int],
    reason: Reason,
) -> _Pair:
    """Return the best decode pod for the first of these prefill pods, or for none of them.

    price: of a second on a prefill pod. reason: why these prefill pods were chosen, if there are any.
    """
    before = prefills[0].seconds * price if prefills else math.inf
    sums = [min(before + each.after_prefill, each.alone) for each in decodes]
    limit = min(sums) + TICK_S
    least, candidate = min(
        [(total, each) for total, each in zip(sums, decodes, strict=True) if total < limit],
        key=lambda pair: (tie(pair[1].pod), pair[1].pod.slot),
    )
    return _Pair(
        least, candidate, [] if least == candidate.alone else prefills, reason if prefills else "no_prefill_pods"
    )


def _price(pair: _Pair) -> float:
    return pair.price


def _tie_breaker(session: str) -> Callable[[Pod], int]:
    """Return the order of pods with equal prices: by session, or, without a session, the least often chosen pod first.

    A session's order is the same in every gateway. When a pod comes or goes, only the sessions that this pod serves
    move (rendezvous hashing).
    """
    if not session:
        return lambda pod: pod.dispatched
    seed = zlib.crc32(session.encode(errors="replace"))
    return lambda pod: zlib.crc32(pod.address.encode(), seed)
