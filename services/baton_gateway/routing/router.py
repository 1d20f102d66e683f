"""Finds the pods that may serve a request, lets a policy choose, and charges the chosen pods. It does no I/O."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from .breaker import Breaker
from .canary import CanaryShare
from .demand import Demand
from .pods import InFlight, Pod
from .policies import Group, PodChoice, Policy

_RATE_RAISE = 0.02
# The pods of a pool are alike. A pod that seems slower by more than this factor was stalled when its rate was learned.
_STALL_FACTOR = 20


class Route:
    """The pods chosen for a request, and the load charged to them. Each charge is released once."""

    def __init__(
        self, choice: PodChoice, demand: Demand, clock: Callable[[], float], freed: Callable[[], None] = lambda: None
    ) -> None:
        """clock: returns seconds. freed: called when a charge has been released."""
        self.decode = choice.decode
        self.prefills = choice.prefills
        self.reason = choice.reason
        self.num_cached = choice.num_cached
        self._waiting = list(choice.prefills)  # prefill pods that have not failed
        self._clock = clock
        self._freed = freed
        self._sent_at = clock()
        self._num_tokens = demand.num_tokens
        self._trials: list[Breaker] = []
        self._charges: list[tuple[InFlight, int]] = []
        self.queued = 0  # the prefilling pod's work when it got this prompt, including the prompt (Pod.prompt_work)
        self._charge(self.decode.requests, 1)
        self._admit(self.decode)
        self._start_prefill(choice.num_cached)

    @property
    def prefilling(self) -> Pod:
        """The pod that should prefill: the first prefill pod that has not failed, else the decode pod."""
        return self._waiting[0] if self._waiting else self.decode

    def handover_failed(self, address: str) -> None:
        """Note that a prefill pod failed. The next one prefills; after the last, the decode pod itself."""
        now = self._clock()
        for pod in [pod for pod in self._waiting if pod.address == address]:
            pod.breaker.fail(now)
            self._trial_ended(pod.breaker)
            was_first = pod is self._waiting[0]
            self._waiting.remove(pod)
            # Once the prompt is prefilled, its charge is released and need not move to the next pod.
            if was_first and len(self._charges) > 1:
                self._release(1)
                self._sent_at = now
                self._start_prefill(0)

    def prefilled(self, disaggregated: bool = False) -> None:
        """Release the charge of the prefill, which is done. disaggregated: a prefill pod did it."""
        if len(self._charges) < 2:
            return
        self._release(1)
        self._succeeded(self.decode.breaker)
        if disaggregated == bool(self._waiting):
            self._succeeded(self.prefilling.breaker)
            self.prefilling.learn_rate(self.queued, self._clock() - self._sent_at)
        self._freed()

    def decode_failed(self) -> None:
        """Count a failure of the decode pod, which was lost, stalled or refused the request."""
        self.decode.breaker.fail(self._clock())
        self._trial_ended(self.decode.breaker)

    def done(self) -> None:
        """Release all charges when the request has left its pods."""
        self._release(0)
        for breaker in self._trials:
            breaker.release()
        self._trials.clear()
        self._freed()

    def _succeeded(self, breaker: Breaker) -> None:
        breaker.succeed()
        self._trial_ended(breaker)

    def _trial_ended(self, breaker: Breaker) -> None:
        """Note that this request, if it was the trial request of a half-open breaker, has had its outcome."""
        if breaker in self._trials:
            self._trials.remove(breaker)
            # A breaker ignores a failure before its pause is over, so this trial would otherwise never end.
            breaker.release()

    def _start_prefill(self, cached: int) -> None:
        pod = self.prefilling
        work = pod.prompt_work(self._num_tokens - cached, cached)
        self.queued = pod.prefill_tokens.load + work
        self._charge(pod.prefill_tokens, work)
        if pod is not self.decode:
            self._admit(pod)

    def _admit(self, pod: Pod) -> None:
        pod.dispatched += 1
        if pod.breaker.admit():
            self._trials.append(pod.breaker)

    def _charge(self, work: InFlight, amount: int) -> None:
        work.charge(amount)
        self._charges.append((work, amount))

    def _release(self, first: int) -> None:
        for work, amount in self._charges[first:]:
            work.charge(-amount)
        del self._charges[first:]


class Router:
    """The pods of a pool, and the policy that chooses among them."""

    def __init__(
        self, decodes: Iterable[Pod], prefills: Iterable[Pod], policy: Policy, clock: Callable[[], float]
    ) -> None:
        """clock: returns monotonic seconds."""
        self.decodes: list[Pod] = []
        self.prefills: list[Pod] = []
        self.canary: CanaryShare | None = None
        self.freed: Callable[[], None] = lambda: None  # called when a charge has been released
        self._policy = policy
        self._clock = clock
        for pod in decodes:
            self.add(pod, self.decodes)
        for pod in prefills:
            self.add(pod, self.prefills)

    def add(self, pod: Pod, role: list[Pod]) -> None:
        """Add a pod and give it a free slot. role: `decodes` or `prefills`."""
        taken = {other.slot for other in (*self.decodes, *self.prefills)}
        pod.slot = next(slot for slot in itertools.count() if slot not in taken)
        role.append(pod)

    def remove(self, pod: Pod) -> None:
        """Remove a pod. Its slot may be given to another."""
        for role in (self.decodes, self.prefills):
            role[:] = [other for other in role if other is not pod]

    def dispatch(self, demand: Demand, avoid: Collection[str] = (), fingerprint: str | None = None) -> Route | None:
        """Choose pods and charge them; None when no decode pod can take the request.

        avoid: addresses of decode pods that are chosen only when no other can take the request. fingerprint: of weights
        and KV layout, which the decode pod must have; None = any.
        """
        return self._route(demand, list(self._candidates(demand, avoid, fingerprint).values()))

    def has_other(self, demand: Demand, avoid: Collection[str], fingerprint: str | None) -> bool:
        """Whether a decode pod outside `avoid`, whose breaker allows requests, could take the request."""
        now = self._clock()
        return any(
            pod.address not in avoid and pod.breaker.allows(now)
            for group in self._candidates(demand, avoid, fingerprint).values()
            for pod in group.decodes
        )

    def shadow(self, demand: Demand) -> Route | None:
        """Choose and charge pods of a shadow canary for a copy of a request; None if the canary gets no copy."""
        canary = self.canary
        if canary is None or not canary.shadow or not canary.takes(demand.canary_draw):
            return None
        group = self._groups(demand, (), None).get(canary.revision)
        return self._route(demand, [group]) if group is not None else None

    def _candidates(self, demand: Demand, avoid: Collection[str], fingerprint: str | None) -> dict[str, Group]:
        groups = self._groups(demand, avoid, fingerprint)
        if self.canary is not None and fingerprint is None:
            groups = _share(groups, self.canary, demand.canary_draw)
        return groups

    def _route(self, demand: Demand, groups: Sequence[Group]) -> Route | None:
        if not groups:
            return None
        route = Route(self._policy.choose(demand, groups), demand, self._clock, self.freed)
        self._raise_learned_rates(route.prefilling)
        return route

    def _raise_learned_rates(self, chosen: Pod) -> None:
        """Raise the learned rates of the prefill pods that were not chosen, up to that of the fastest one.

        A rate that was learned while a pod was slow for another reason keeps requests away from the pod, so that
        nothing would correct it. With this, a pod that seems k times as slow as the fastest one is tried again after
        about log(k) / log(1 + _RATE_RAISE) requests: 35 for 2 times, 150 for _STALL_FACTOR = 20 times and for more.
        """
        fastest = max((pod.learned_rate for pod in self.prefills), default=0.0)
        for pod in self.prefills:
            if pod is not chosen and pod.learned_rate:
                pod.learned_rate = min(fastest, max(pod.learned_rate * (1 + _RATE_RAISE), fastest / _STALL_FACTOR))

    def partners(self, decode: Pod) -> list[Pod]:
        """Return the live prefill pods of the same revision as a decode pod."""
        return [pod for pod in self.prefills if pod.live and pod.revision == decode.revision]

    def prefilling(self) -> list[Pod]:
        """Return the pods that may prefill a new request; none when no decode pod is live."""
        now = self._clock()
        decodes = [pod for pod in self.decodes if pod.live]
        if not decodes:
            return []
        prefills = [pod for pod in self.prefills if pod.live and pod.breaker.allows(now)]
        return prefills or [pod for pod in decodes if pod.breaker.allows(now)] or decodes

    @property
    def ready(self) -> bool:
        """Whether a decode pod is live and, if the pool has prefill pods, a live one has the same revision."""
        decoding = {pod.revision for pod in self.decodes if pod.live}
        if not self.prefills:
            return bool(decoding)
        return any(pod.live and pod.revision in decoding for pod in self.prefills)

    def _groups(self, demand: Demand, avoid: Collection[str], fingerprint: str | None) -> dict[str, Group]:
        now = self._clock()
        fits = [pod for pod in self.decodes if pod.live and pod.max_model_len >= demand.max_total_tokens]
        if fingerprint is not None:
            fits = [pod for pod in fits if pod.fingerprint == fingerprint]
        # If the breakers of all decode pods are open, these pods are used nevertheless. Prefill pods with open breakers
        # never are, since decode pods can prefill.
        wanted = [pod for pod in fits if pod.address not in avoid] if avoid else fits
        sound = [pod for pod in wanted if pod.breaker.allows(now)]
        prefills = [
            pod
            for pod in self.prefills
            if pod.live and pod.max_model_len >= demand.max_total_tokens and pod.breaker.allows(now)
        ]
        groups: defaultdict[str, Group] = defaultdict(lambda: Group([], []))
        for pod in sound or wanted or fits:
            groups[pod.revision].decodes.append(pod)
        for pod in prefills:
            if pod.revision in groups:
                groups[pod.revision].prefills.append(pod)
        return groups


def _share(groups: dict[str, Group], canary: CanaryShare, canary_draw: float) -> dict[str, Group]:
    """Return the groups, by revision, that a request with this draw may go to.

    A canary with a share serves all requests when no other revision can, and the other way round. A canary without a
    share serves none.
    """
    trial = {revision: group for revision, group in groups.items() if revision == canary.revision}
    others = {revision: group for revision, group in groups.items() if revision != canary.revision}
    if canary.shadow or not canary.weight:
        return others
    return (trial or others) if canary.takes(canary_draw) else (others or trial)
