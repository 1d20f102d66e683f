"""The policy that knows what pods have cached and predicts how long each would take."""

import heapq
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton_gateway.cost import CostModel
from baton_gateway.demand import Demand
from baton_gateway.pods import Pod
from baton_gateway.policies import MOST_PREFILLS, Choice, Group
from baton_gateway.prefix_index import PrefixIndex

TICK_S = 0.001  # predictions that differ by less are equal
CACHED_SHARE = 0.8  # of a prompt, at which it stays where that is


class _Bid(NamedTuple):
    """A pod that may be chosen; of two the smaller is the better, and by their slots no two are equal."""

    ticks: int
    tie: int
    slot: int
    seconds: float
    pod: Pod
    cached: int  # tokens of the prompt


class _Pair(NamedTuple):
    """A decode pod, and the prefill pod or None if it is to prefill; compared as bids are."""

    ticks: int
    tie: int
    slot: int
    seconds: float
    decode: _Bid
    prefill: _Bid | None
    others: Sequence[_Bid]  # prefill pods to be asked next


class KvAware:
    """The pair of pods with the least predicted TTFT.

    A prompt stays on pods that have most of it cached unless that is predicted to take more than (1 + stay_margin)
    times as long as the best pair: small differences in load would spread a prefix over all pods otherwise.
    """

    def __init__(
        self, index: PrefixIndex, costs: CostModel | None = None, stay_margin: float = 0.5, local_prefill: bool = True
    ) -> None:
        """local_prefill: whether a decode pod may prefill although there are prefill pods."""
        self._index = index
        self._costs = costs or CostModel()
        self._stay_margin = stay_margin
        self._local_prefill = local_prefill

    def choose(self, demand: Demand, groups: Sequence[Group]) -> Choice:
        cached = self._cached(demand, groups)
        tie = _tie_breaker(demand.session)
        most = CACHED_SHARE * demand.num_tokens
        free: list[_Pair] = []
        staying: list[_Pair] = []
        for group in groups:
            prefills = self._prefill_bids(demand, group.prefills, cached, tie)
            decodes = self._decode_bids(demand, group.decodes, cached, tie)
            best = heapq.nsmallest(MOST_PREFILLS, prefills)
            free.append(self._best_pair(demand, decodes, best))
            holding = heapq.nsmallest(MOST_PREFILLS, [bid for bid in prefills if bid.cached >= most])
            holders = [bid for bid in decodes if bid.cached >= most]
            if holding or holders:
                staying.append(self._best_pair(demand, holders or decodes, holding or best))
        chosen = min(free)
        if staying and min(staying).seconds <= chosen.seconds * (1 + self._stay_margin):
            chosen = min(staying)
        if chosen.prefill is None:
            return Choice(chosen.decode.pod, [], chosen.decode.cached, chosen.seconds)
        return Choice(
            chosen.decode.pod,
            [chosen.prefill.pod, *(bid.pod for bid in chosen.others)],
            chosen.prefill.cached,
            chosen.seconds,
        )

    def _cached(self, demand: Demand, groups: Sequence[Group]) -> dict[int, int]:
        """Return by slot how many tokens of the prompt a pod has; none = not in it."""
        sizes = {pod.block_size for group in groups for pods in (group.decodes, group.prefills) for pod in pods} - {0}
        return {slot: blocks * size for size in sizes for slot, blocks in self._index.match(demand.keys(size)).items()}

    def _prefill_bids(
        self, demand: Demand, pods: Iterable[Pod], cached: dict[int, int], tie: Callable[[Pod], int]
    ) -> list[_Bid]:
        """Return the prefill pods, each with the time until it has computed the prompt."""
        bids = []
        for pod in pods:
            known = cached.get(pod.slot, 0)
            seconds = self._costs.prefill(pod, demand.num_tokens - known)
            bids.append(_Bid(int(seconds / TICK_S), tie(pod), pod.slot, seconds, pod, known))
        return bids

    def _decode_bids(
        self, demand: Demand, pods: Iterable[Pod], cached: dict[int, int], tie: Callable[[Pod], int]
    ) -> list[_Bid]:
        """Return the decode pods, each with the time that it takes beside the prefill."""
        bids = []
        for pod in pods:
            known = cached.get(pod.slot, 0)
            seconds = self._costs.decode_wait(pod, demand.num_tokens - known)
            bids.append(_Bid(int(seconds / TICK_S), tie(pod), pod.slot, seconds, pod, known))
        return bids

    def _best_pair(self, demand: Demand, decodes: Sequence[_Bid], prefills: Sequence[_Bid]) -> _Pair:
        """Return the best decode pod for the first of some prefill pods, which are in order; or for none of them."""
        costs, prefill = self._costs, prefills[0] if prefills else None
        pairs = []
        for bid in decodes:
            missing = demand.num_tokens - bid.cached
            local = costs.local_prefill(bid.pod, missing) if self._local_prefill and prefill is not None else None
            if prefill is None:
                seconds, by = costs.prefill(bid.pod, missing), None
            else:
                seconds, by = prefill.seconds + costs.transfer(bid.pod, missing), prefill
                if local is not None and local < seconds:
                    seconds, by = local, None
            seconds += bid.seconds
            pairs.append(_Pair(int(seconds / TICK_S), bid.tie, bid.slot, seconds, bid, by, prefills[1:]))
        return min(pairs)


def _tie_breaker(session: str) -> Callable[[Pod], int]:
    """Return the order of pods that are equal else: by session, or without one the least often chosen first.

    A session's order is the same in every gateway, and a pod more or less moves only the sessions that were on it
    (rendezvous hashing).
    """
    if not session:
        return lambda pod: pod.dispatched
    seed = zlib.crc32(session.encode())
    return lambda pod: zlib.crc32(pod.address.encode(), seed)
