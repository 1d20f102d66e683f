"""Lets requests in when a pod is about to have time for them; until then they wait here, where tenants take turns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..concurrency.fair_queue import FairQueue
from ..errors import ApiError, overloaded
from .cost import CostModel
from .demand import Demand
from .pods import Pod
from .prefix_index import PrefixIndex
from .router import Router

_LONGEST_RETRY_S = 60  # OpenAI's SDK does not try again at all when it is told to wait for longer than two minutes


@dataclass(eq=False, slots=True)
class Ask:
    """A request that wants in.

    come_in: called once when its turn has come, at once or later; it sends its prompts to pods. refuse: called instead
    when it has to go. priority: of its tenant among tenants; less is more urgent. order: of the request among those of
    its tenant; less goes first.
    """

    demands: Sequence[Demand]  # of its prompts
    come_in: Callable[[], None]
    refuse: Callable[[ApiError], None]
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    order: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(demand.num_tokens for demand in self.demands)


class Admission:
    """Keeps what is queued for prefill on pods short, because a pod knows no tenants."""

    def __init__(
        self,
        router: Router,
        index: PrefixIndex,
        costs: CostModel,
        *,
        most_waiting: int,
        pod_queue_s: float,
        ttft_slo_s: float,
    ) -> None:
        """most_waiting: requests that may wait. Times in seconds; pod_queue_s: of prefill that a pod may have queued
        when it gets another request; ttft_slo_s: who would wait for so long is refused at once."""
        self._router = router
        self._index = index
        self._costs = costs
        self._pod_queue_s = pod_queue_s
        self._ttft_slo_s = ttft_slo_s
        self._queue: FairQueue[Ask] = FairQueue(most_waiting)
        self._letting_in = False
        router.freed = self.let_in

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def ask(self, ask: Ask) -> None:
        """Let a request in, have it wait for its turn, or refuse it because that would take too long."""
        pods = self._router.prefilling()
        # Without pods it learns that by coming in.
        if not pods or (not self._queue and self._has_room(pods, ask)):
            ask.come_in()
            return
        tokens = ask.num_tokens
        missing = sum(map(self._missing, ask.demands))
        rate = sum(map(self._costs.prefill_rate, pods))
        ahead = self._queue.ahead(ask.tenant, missing, ask.weight, ask.priority, ask.order)
        wait = (ahead + sum(pod.prefill_tokens.ahead_of(tokens) for pod in pods)) / rate
        # What a prompt takes by itself will not be less later.
        slack = max(self._ttft_slo_s - missing / max(map(self._costs.prefill_rate, pods)), self._pod_queue_s)
        if wait > slack:
            ask.refuse(_too_busy(wait - slack))
            return
        pushed_out = self._queue.push(ask.tenant, ask, max(missing, 1), ask.weight, ask.priority, ask.order)
        if pushed_out is not None:
            pushed_out.refuse(_too_busy(wait))
        self.let_in()

    def withdraw(self, ask: Ask) -> None:
        """A request waits no longer; it may have been let in or refused."""
        self._queue.remove(ask.tenant, ask, ask.priority)

    def let_in(self) -> None:
        """Let in whose turn it is while there is room. To be called when pods may have got some."""
        if self._letting_in:
            return
        self._letting_in = True
        try:
            while ask := self._queue.pop(lambda ask: self._has_room(self._router.prefilling(), ask)):
                ask.come_in()
        finally:
            self._letting_in = False

    def _has_room(self, pods: Sequence[Pod], ask: Ask) -> bool:
        """Whether a pod is about to have time for a request; longer prompts are overtaken there."""
        tokens = ask.num_tokens
        return not pods or any(
            pod.prefill_tokens.ahead_of(tokens) <= self._pod_queue_s * self._costs.prefill_rate(pod) for pod in pods
        )

    def _missing(self, demand: Demand) -> int:
        """Return the tokens of a prompt that no pod has cached."""
        cached = [
            blocks * size
            for size in {pod.block_size for pod in self._router.prefilling()} - {0}
            for blocks in self._index.match(demand.keys(size)).values()
        ]
        return demand.num_tokens - max(cached, default=0)


def _too_busy(retry_after_s: float) -> ApiError:
    return overloaded(
        "The server is busy: the first token would come too late. Try again later.",
        min(max(math.ceil(retry_after_s), 1), _LONGEST_RETRY_S),
    )
