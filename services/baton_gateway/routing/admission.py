"""Admits requests when a pod can prefill them soon. Until then they wait in a queue in which tenants take turns."""

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

_LONGEST_RETRY_S = 60  # OpenAI's SDK does not retry at all if Retry-After is longer than two minutes


@dataclass(eq=False, slots=True)
class AdmissionRequest:
    """A request that waits for admission.

    admit: called once when the request is admitted; it sends the prompts to pods. refuse: called instead if the
    request is refused. priority: of the tenant; lower is more urgent. order: among the requests of the tenant; lower is
    admitted first.
    """

    demands: Sequence[Demand]  # one for each of its prompts
    admit: Callable[[], None]
    refuse: Callable[[ApiError], None]
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    order: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(demand.num_tokens for demand in self.demands)


class Admission:
    """Keeps the prefill queues of pods short: pods do not know tenants, so fairness is only possible here."""

    def __init__(
        self,
        router: Router,
        index: PrefixIndex,
        costs: CostModel,
        *,
        max_waiting: int,
        pod_queue_s: float,
        ttft_slo_s: float,
    ) -> None:
        """max_waiting: requests that may wait. pod_queue_s: seconds of prefill that a pod may have queued when it gets
        another request. ttft_slo_s: a request whose predicted TTFT is longer is refused at once."""
        self._router = router
        self._index = index
        self._costs = costs
        self._pod_queue_s = pod_queue_s
        self._ttft_slo_s = ttft_slo_s
        self._queue: FairQueue[AdmissionRequest] = FairQueue(max_waiting)
        self._admitting = False
        router.freed = self.admit_waiting

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(self, request: AdmissionRequest) -> None:
        """Admit a request, queue it, or refuse it because its predicted wait is too long."""
        pods = self._router.prefilling()
        # Without pods the request is admitted too: sending it then fails with the right error.
        if not pods or (not self._queue and self._has_room(pods, request)):
            request.admit()
            return
        tokens = request.num_tokens
        missing = sum(self._missing(demand, pods) for demand in request.demands)
        rate = sum(map(self._costs.prefill_rate, pods))
        ahead = self._queue.ahead(request.tenant, missing, request.weight, request.priority, request.order)
        wait = (ahead + sum(pod.prefill_tokens.ahead_of(pod.prompt_work(tokens)) for pod in pods)) / rate
        # The prefill time of the prompt itself is part of the SLO, and waiting does not shorten it.
        slack = max(self._ttft_slo_s - missing / max(map(self._costs.prefill_rate, pods)), self._pod_queue_s)
        if wait > slack:
            request.refuse(_too_busy(wait - slack))
            return
        pushed_out = self._queue.push(
            request.tenant, request, max(missing, 1), request.weight, request.priority, request.order
        )
        if pushed_out is not None:
            pushed_out.refuse(_too_busy(wait))
        self.admit_waiting()

    def withdraw(self, request: AdmissionRequest) -> None:
        """Remove a request from the queue, if it still waits there."""
        self._queue.remove(request.tenant, request, request.priority)

    def admit_waiting(self) -> None:
        """Admit queued requests in turn while pods have room. Call this when a pod may have got room."""
        if self._admitting:
            return
        self._admitting = True
        try:
            while request := self._queue.pop(lambda request: self._has_room(self._router.prefilling(), request)):
                request.admit()
        finally:
            self._admitting = False

    def _has_room(self, pods: Sequence[Pod], request: AdmissionRequest) -> bool:
        """Whether a pod can prefill a request soon. Longer prompts queued there do not count, as it overtakes them."""
        tokens = request.num_tokens
        return not pods or any(
            pod.prefill_tokens.ahead_of(pod.prompt_work(tokens)) <= self._pod_queue_s * self._costs.prefill_rate(pod)
            for pod in pods
        )

    def _missing(self, demand: Demand, pods: Sequence[Pod]) -> int:
        """Return the work of the tokens of a prompt that the pod with the longest cached prefix lacks, as such pods
        count it."""
        cached = [
            blocks * size
            for size in {pod.block_size for pod in pods} - {0}
            for blocks in self._index.match(demand.keys(size)).values()
        ]
        known = max(cached, default=0)
        return max(pod.prompt_work(demand.num_tokens - known, known) for pod in pods)


def _too_busy(retry_after_s: float) -> ApiError:
    return overloaded(
        "The server is busy: the first token would come too late. Try again later.",
        min(max(math.ceil(retry_after_s), 1), _LONGEST_RETRY_S),
    )
