"""The pods of a pool: the connections to them, and the routing of requests among them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable

from baton_proto import serving_pb2 as pb

from ..concurrency.background import keep_running
from ..errors import no_decode_pod
from ..routing.admission import Admission
from ..routing.breaker import State
from ..routing.cost import CostModel
from ..routing.demand import Demand
from ..routing.kv_aware import KvAware
from ..routing.pods import Pod, PodLimits
from ..routing.policies import LeastLoaded, Policy, Random, RoundRobin
from ..routing.prefix_index import PrefixIndex
from ..routing.retry_budget import RetryBudget
from ..routing.router import Route, Router
from ..routing.stalls import StallTimeouts
from ..settings import GatewaySettings
from ..telemetry.retry_metrics import RetryMetrics
from ..telemetry.revision_metrics import RevisionMetrics, Run
from ..telemetry.router_metrics import RouterMetrics
from .contact import Contact
from .decode_link import DecodeLink
from .resume_queue import ResumeQueue
from .shadow import Shadow

log = logging.getLogger(__name__)

_ADMIT_S = 0.05
_CHECK_S = 1.0


class Fleet:
    """Keeps in contact with every pod, and chooses pods for requests."""

    def __init__(
        self,
        settings: GatewaySettings,
        model: str,
        revisions: RevisionMetrics,
        routing: RouterMetrics,
        retries: RetryMetrics,
        budget: RetryBudget,
        decodes: Iterable[str] = (),
        prefills: Iterable[str] = (),
    ) -> None:
        """budget: shared by all pools of the gateway. decodes, prefills: addresses of the pods known at the start.

        Raises PeerTlsError, PeerTokenError.
        """
        self._settings = settings
        self._tls, self._token = settings.peer_tls, settings.peer_token
        self._model = model
        self._revisions = revisions
        self._routing = routing.of(model)
        self.retries = retries.of(model)
        self.budget = budget
        self.resumes = ResumeQueue()
        self._contacts: dict[int, Contact] = {}  # by slot
        self._ending: set[asyncio.Task[None]] = set()
        self._admitting: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._shadows: set[Shadow] = set()
        self._was_ready = False
        self._last_limits: PodLimits | None = None  # as of the last change after which any pod was live
        self._live: set[int] = set()  # slots of the decode pods that were live at the last change
        self._index = PrefixIndex(settings.prefix_index_entries)
        costs = CostModel(transfer_rate=settings.kv_transfer_rate)
        self.stalls = StallTimeouts(settings.first_token_timeout_s, settings.inter_token_timeout_s, costs)
        self.router = Router(
            [Pod(address, connected=False) for address in decodes],
            [Pod(address) for address in prefills],
            _policy(settings, self._index, costs),
            time.monotonic,
        )
        self.admission = Admission(
            self.router,
            self._index,
            costs,
            time.monotonic,
            max_waiting=settings.max_waiting_requests,
            pod_queue_s=settings.pod_queue_s,
            ttft_slo_s=settings.ttft_slo_s,
            pod_wait_s=settings.pod_wait_s,
        )

    def start(self) -> None:
        for role in (self.router.decodes, self.router.prefills):
            for pod in role:
                self._open_contact(pod, role)
        self._admitting = keep_running("queue", self._keep_admitting)
        self._checking = keep_running("stalled streams", self._keep_checking)

    async def stop(self) -> None:
        running = [task for task in (self._admitting, self._checking) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self.resumes.close()
        await asyncio.gather(*(contact.end() for contact in self._contacts.values()), *self._ending)

    def follow(self, decodes: Collection[str], prefills: Collection[str]) -> None:
        """Route requests only to the pods at these addresses from now on.

        A removed pod gets no new requests, may finish its running ones, and is forgotten when its reports end.
        """
        for wanted, role in ((decodes, self.router.decodes), (prefills, self.router.prefills)):
            for pod in list(role):
                pod.listed = pod.address in wanted
                self._forget_if_gone(self._contacts[pod.slot])
            for address in sorted(set(wanted) - {pod.address for pod in role}):
                pod = Pod(address, connected=role is self.router.prefills)
                self.router.add(pod, role)
                self._open_contact(pod, role)
        self._send_partners()

    @property
    def ready(self) -> bool:
        return self.router.ready

    def limits(self) -> PodLimits | None:
        """Return the longest request that every live decode pod can take; None when no pod is live."""
        live = [pod for pod in self.router.decodes if pod.live]
        if not live:
            return None
        return PodLimits(min(pod.max_model_len for pod in live), min(pod.vocab_size for pod in live))

    def expected_limits(self) -> PodLimits | None:
        """Return the last known limits while a replacement of the last live pod is expected; else None."""
        return self._last_limits if self.admission.expects_pod else None

    def live_pods(self) -> dict[str, int]:
        """Return the number of live pods by role."""
        router = self.router
        return {
            "decode": sum(pod.live for pod in router.decodes),
            "prefill": sum(pod.live for pod in router.prefills),
        }

    def breakers(self) -> dict[str, Counter[State]]:
        """Return the number of pods by role and by the state of their breakers."""
        now, router = time.monotonic(), self.router
        return {
            "decode": Counter(pod.breaker.state(now) for pod in router.decodes),
            "prefill": Counter(pod.breaker.state(now) for pod in router.prefills),
        }

    def dispatch(
        self, demand: Demand, avoid: Collection[str] = (), fingerprint: str | None = None
    ) -> tuple[Route, DecodeLink, Run]:
        """Choose pods, as Router.dispatch does, and charge them. Raises ApiError 503 when no decode pod is live."""
        began = time.perf_counter()
        route = self.router.dispatch(demand, avoid, fingerprint)
        self._routing.decided(route, time.perf_counter() - began)
        if route is None:
            raise no_decode_pod()
        return route, self._link(route), self._revisions.begin(self._model, route.decode.revision)

    def prefilled(self, route: Route, prompt: pb.PromptInfo) -> None:
        """Note that a prompt has been prefilled, because its first token has arrived."""
        route.prefilled(prompt.disaggregated)
        self._routing.prefilled(route.num_cached, prompt.cached_tokens)

    @property
    def shadowed(self) -> bool:
        """Whether a canary gets copies of requests."""
        return self.router.canary is not None and self.router.canary.shadow

    def shadow(self, submit: pb.Submit, demand: Demand) -> None:
        """Send a copy of a request to the shadow canary, if its weight selects this request."""
        route = self.router.shadow(demand)
        if route is not None:
            run = self._revisions.begin(self._model, route.decode.revision)
            shadow = Shadow(route, run, self.stalls, self._shadows.discard)
            self._shadows.add(shadow)
            shadow.start(submit, self._link(route))

    def _link(self, route: Route) -> DecodeLink:
        link = self._contacts[route.decode.slot].link
        assert link is not None
        return link

    def _open_contact(self, pod: Pod, role: list[Pod]) -> None:
        kind = pb.ROLE_DECODE if role is self.router.decodes else pb.ROLE_PREFILL
        settings = self._settings
        self._contacts[pod.slot] = Contact(
            pod,
            kind,
            self._index,
            settings.worker_timeout_s,
            self._changed,
            self._tls,
            self._token,
            settings.require_cache_scopes,
        )

    def _changed(self, contact: Contact) -> None:
        self._forget_if_gone(contact)
        self._send_partners()
        live = {pod.slot for pod in self.router.decodes if pod.live}
        if live - self._live:
            self.resumes.pods_changed()
        self._live = live
        self._last_limits = self.limits() or self._last_limits
        self.admission.note_pods()
        if self.router.ready and not self._was_ready:
            self._was_ready = True
            log.info("ready", extra={"event": "ready"})

    def _send_partners(self) -> None:
        """Send each decode pod the addresses of the prefill pods it may use."""
        for link in [contact.link for contact in self._contacts.values() if contact.link is not None]:
            link.set_prefill_addresses([partner.address for partner in self.router.partners(link.pod)])

    def _forget_if_gone(self, contact: Contact) -> None:
        pod = contact.pod
        if pod.listed or pod.reporting or self._contacts.get(pod.slot) is not contact:
            return
        log.info("pod forgotten", extra={"pod": pod.address})
        del self._contacts[pod.slot]
        self._index.drop(pod.slot)
        self.router.remove(pod)
        # In a task, because this may run inside a callback of the contact that ends.
        task = asyncio.create_task(contact.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _keep_admitting(self) -> None:
        """Admit waiting requests at intervals.

        A pod can get room with no event in this gateway: requests of other gateways end, and rates change.
        """
        while True:
            await asyncio.sleep(_ADMIT_S)
            self.admission.admit_waiting()

    async def _keep_checking(self) -> None:
        """Check all requests for stalls at intervals. A timer for each request would cost time per token.

        A round that starts late is skipped: the event loop was blocked, so tokens may have arrived but not been read.
        """
        every_s = min(self.stalls.first_token_s / 8, self.stalls.inter_token_s / 8, _CHECK_S)
        last = time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            if now - last < 2 * every_s + _CHECK_S:
                for link in [contact.link for contact in self._contacts.values() if contact.link is not None]:
                    link.check(now)
            last = now


def _policy(settings: GatewaySettings, index: PrefixIndex, costs: CostModel) -> Policy:
    match settings.routing_policy:
        case "random":
            return Random()
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "kv_aware":
            return KvAware(index, costs, settings.stay_margin, settings.local_prefill)
