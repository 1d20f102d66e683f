"""Admits requests when a pod can prefill them soon. Until then they wait in a queue in which tenants take turns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..concurrency.fair_queue import FairQueue
from ..errors import ApiError, no_decode_pod, overloaded
from .cost import CostModel
from .demand import Demand
from .pods import Pod
from .prefix_index import PrefixIndex
from .router import Router

_REPLACED_WITHIN_S = 30.0  # a pod that is gone for longer counts as lost, not as being replaced
_LONGEST_RETRY_S = 60  # OpenAI's SDK does not retry at all if Retry-After is longer than two minutes


@dataclass(eq=False, slots=True)
class AdmissionRequest:
    """A request that waits for admission.

    admit: called once when the request is admitted; it sends the prompts to pods. refuse: called instead if the request
    is refused. priority: the tenant's; lower is more urgent. order: the rank among the tenant's requests; lower is
    admitted first.
    """

    demands: Sequence[Demand]  # one for each of its prompts
    admit: Callable[[], None]
    refuse: Callable[[ApiError], None]
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    order: int = 0
    submitted_at: float = field(default=0.0, init=False)

    @property
    def num_tokens(self) -> int:
        return sum(demand.num_tokens for demand in self.demands)


class Admission:
    """Keeps the prefill queues of pods short, because only the gateway's queue knows the weights of tenants."""

    def __init__(
        self,
        router: Router,
        index: PrefixIndex,
        costs: CostModel,
        clock: Callable[[], float],
        *,
        max_waiting: int,
        pod_queue_s: float,
        ttft_slo_s: float,
        pod_wait_s: float,
    ) -> None:
        """clock: returns monotonic seconds. max_waiting: requests that may wait. pod_queue_s: seconds of
        prefill that a pod may have queued when it gets another request. ttft_slo_s: a request whose predicted TTFT is
        longer is refused at once. pod_wait_s: seconds that a request waits for a decode pod that is being replaced."""
        self._router = router
        self._index = index
        self._costs = costs
        self._clock = clock
        self._pod_queue_s = pod_queue_s
        self._ttft_slo_s = ttft_slo_s
        self._pod_wait_s = pod_wait_s
        self._live_at = -math.inf  # when a decode pod was last seen live
        self._queue: FairQueue[AdmissionRequest] = FairQueue(max_waiting)
        self._admitting = False
        router.freed = self.admit_waiting

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def expects_pod(self) -> bool:
        """Whether no decode pod is live, but one was so recently that it is probably being replaced."""
        return not self._router.prefilling() and self._clock() - self._live_at < _REPLACED_WITHIN_S

    def submit(self, request: AdmissionRequest) -> None:
        """Admit a request, queue it, or refuse it because its predicted wait is too long."""
        pods = self._router.prefilling()
        request.submitted_at = self._clock()
        if not pods:
            self._wait_for_pod(request)
            return
        if not self._queue and self._has_room(pods, request):
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
        self._enqueue(request, missing, wait)

    def note_pods(self) -> None:
        """Note whether a decode pod is live. Call this when one may have become live."""
        if self._router.prefilling():
            self._live_at = self._clock()

    def withdraw(self, request: AdmissionRequest) -> None:
        """Remove a request from the queue, if it still waits there."""
        self._queue.remove(request.tenant, request, request.priority)

    def admit_waiting(self) -> None:
        """Admit queued requests in turn while pods have room. Call this when a pod may have got room, and at intervals.

        Without a live decode pod, refuse the requests that have waited long enough for one.
        """
        if self._admitting:
            return
        self._admitting = True
        try:
            self.note_pods()
            if not self._router.prefilling():
                self._refuse_late()
            while request := self._queue.pop(lambda request: self._has_room(self._router.prefilling(), request)):
                request.admit()
        finally:
            self._admitting = False

    def _wait_for_pod(self, request: AdmissionRequest) -> None:
        """Queue a request until a decode pod is live, or refuse it if none is expected."""
        if self.expects_pod:
            self._enqueue(request, request.num_tokens, self._pod_wait_s)
        else:
            request.refuse(no_decode_pod())

    def _enqueue(self, request: AdmissionRequest, missing: int, wait: float) -> None:
        """missing: the prefill work of its prompts. wait: the predicted wait in seconds; a request that finds no place
        in the queue gets it as Retry-After.
        """
        pushed_out = self._queue.push(
            request.tenant, request, max(missing, 1), request.weight, request.priority, request.order
        )
        if pushed_out is not None:
            pushed_out.refuse(_too_busy(wait))
        self.admit_waiting()

    def _refuse_late(self) -> None:
        """Refuse the requests that have waited for `pod_wait_s`, unless a decode pod was live in that time."""
        latest = self._clock() - self._pod_wait_s
        if self._live_at > latest:
            return
        for request in [request for request in self._queue if request.submitted_at <= latest]:
            self.withdraw(request)
            request.refuse(no_decode_pod())

    def _has_room(self, pods: Sequence[Pod], request: AdmissionRequest) -> bool:
        """Whether a pod can prefill a request soon. The pod runs shorter prompts first, so longer ones do not count."""
        tokens = request.num_tokens
        return any(
            pod.prefill_tokens.ahead_of(pod.prompt_work(tokens)) <= self._pod_queue_s * self._costs.prefill_rate(pod)
            for pod in pods
        )

    def _missing(self, demand: Demand, pods: Sequence[Pod]) -> int:
        """Return the work (Pod.prompt_work) of the tokens after the longest prefix of a prompt that any pod caches."""
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
