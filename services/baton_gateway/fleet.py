"""All pods this gateway talks to."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence

import grpc.aio

from baton_gateway.admission import Admission
from baton_gateway.cost import CostModel
from baton_gateway.decode_link import DecodeLink
from baton_gateway.demand import Demand
from baton_gateway.errors import overloaded
from baton_gateway.kv_aware import KvAware
from baton_gateway.pods import Limits, Pod
from baton_gateway.policies import LeastLoaded, Policy, Random, RoundRobin
from baton_gateway.prefix_index import PrefixIndex
from baton_gateway.router import Route, Router
from baton_gateway.settings import GatewaySettings
from baton_gateway.workers import CHANNEL_OPTIONS, Watcher
from baton_proto import serving_pb2 as pb

log = logging.getLogger(__name__)

_LET_IN_S = 0.05


class Fleet:
    """Watches every pod, keeps a link to every decode pod, and chooses pods for requests."""

    def __init__(self, settings: GatewaySettings, decodes: Sequence[str], prefills: Sequence[str]) -> None:
        """decodes, prefills: addresses."""
        self._settings = settings
        self._links: dict[str, DecodeLink] = {}
        self._channels: list[grpc.aio.Channel] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._was_ready = False
        self._index = PrefixIndex(settings.prefix_index_entries)
        costs = CostModel(transfer_rate=settings.kv_transfer_rate)
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
            most_waiting=settings.max_waiting_requests,
            pod_queue_s=settings.pod_queue_s,
            ttft_slo_s=settings.ttft_slo_s,
        )

    def start(self) -> None:
        for pod in self.router.decodes:
            channel = self._watch(pod, pb.ROLE_DECODE)
            self._links[pod.address] = DecodeLink(pod, channel, self._readiness_changed)
        for pod in self.router.prefills:
            self._watch(pod, pb.ROLE_PREFILL)
        self._tasks.append(asyncio.create_task(self._keep_letting_in()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    @property
    def ready(self) -> bool:
        return self.router.ready

    def limits(self) -> Limits | None:
        """Return what every live decode pod can take; None when none is live."""
        live = [pod for pod in self.router.decodes if pod.live]
        if not live:
            return None
        return Limits(min(pod.max_model_len for pod in live), min(pod.vocab_size for pod in live))

    def live_pods(self) -> dict[str, int]:
        """Return the number of live pods by role."""
        router = self.router
        return {
            "decode": sum(pod.live for pod in router.decodes),
            "prefill": sum(pod.live for pod in router.prefills),
        }

    def dispatch(
        self, demand: Demand, avoid: Collection[str] = (), fingerprint: str | None = None
    ) -> tuple[Route, DecodeLink]:
        """Choose pods, as Router.dispatch does, and charge them. Raises ApiError 503 when no decode pod is live."""
        route = self.router.dispatch(demand, avoid, fingerprint)
        if route is None:
            raise overloaded("No decode pod is available now.")
        return route, self._links[route.decode.address]

    def _watch(self, pod: Pod, role: pb.Role) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(pod.address, options=CHANNEL_OPTIONS)
        self._channels.append(channel)
        watcher = Watcher(pod, role, channel, self._index, self._settings.worker_timeout_s, self._reports_changed)
        self._tasks.append(asyncio.create_task(watcher.run()))
        return channel

    def _reports_changed(self, pod: Pod) -> None:
        link = self._links.get(pod.address)
        if link is not None and link.pod is pod:
            if pod.reporting:
                link.open()
            else:
                link.close()
        for link in self._links.values():
            link.introduce([partner.address for partner in self.router.partners(link.pod)])
        self._readiness_changed(pod)

    async def _keep_letting_in(self) -> None:
        """Pods may get room by what other gateways' requests leave, and by time."""
        while True:
            await asyncio.sleep(_LET_IN_S)
            self.admission.let_in()

    def _readiness_changed(self, _pod: Pod) -> None:
        if self.router.ready and not self._was_ready:
            self._was_ready = True
            log.info("ready", extra={"event": "ready"})


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
