"""Reads the reports of one worker pod. A pod whose Watch stream is down does not count as live."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from baton_common.peer_rpc import read_message, why_failed
from baton_proto import serving_pb2 as pb
from baton_proto import serving_pb2_grpc as rpc

from ..routing.breaker import Breaker
from ..routing.pods import Pod
from ..routing.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 0.5
# The bounds of what a pod may report: seconds of prefill per token, queued work in tokens, and seconds of hand-overs.
_LEAST_TOKEN_S, _MOST_TOKEN_S = 1e-9, 1e3
_MOST_WORK = 1 << 53
_MOST_EXPOSED_S = 1e9

CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Pings find a connection that only the other end has dropped, so that the gateway reconnects when the pod is back.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Channels to one address must not share a connection: its failure would hit a new pod, or another gateway.
    ("grpc.use_local_subchannel_pool", 1),
]


class WrongPodError(Exception):
    """The pod at an address has another role than the settings say, or its prefix cache is shared among tenants."""


class Watcher:
    """Keeps the state of one pod up to date from the reports on its Watch stream."""

    def __init__(
        self,
        pod: Pod,
        role: pb.Role,
        channel: Callable[[], Awaitable[grpc.aio.Channel]],
        index: PrefixIndex,
        timeout_s: float,
        changed: Callable[[Pod], None],
        require_cache_scopes: bool = False,
    ) -> None:
        """channel: returns the channel for the next attempt. index: gets the keys of the pod's cached blocks.

        timeout_s: longest time between two reports. changed: called whenever the pod may have become live or lost.
        require_cache_scopes: as in GatewaySettings.
        """
        self._pod = pod
        self._role = role
        self._channel = channel
        self._index = index
        self._timeout_s = timeout_s
        self._changed = changed
        self._require_cache_scopes = require_cache_scopes

    async def run(self) -> None:
        retry_s, logged_reason = FIRST_RETRY_S, ""
        while True:
            try:
                await self._watch()
            except grpc.aio.AioRpcError as error:
                reason = why_failed(error)
            except TimeoutError:
                reason = "silent"
            except WrongPodError as error:
                reason = str(error)
            except Exception:
                # While this task is down, no report updates the pod. The pod must not count as live then.
                self._lose()
                raise
            else:
                reason = "closed"
            if self._pod.reporting:
                retry_s = FIRST_RETRY_S
                log.warning("pod lost", extra={"pod": self._pod.address, "reason": reason})
            else:
                # A refused connection is usual while a pod starts.
                known = reason == logged_reason or "Connection refused" in reason
                level = logging.DEBUG if known else logging.INFO
                log.log(level, "pod out of reach", extra={"pod": self._pod.address, "reason": reason})
            logged_reason = reason
            self._lose()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    def _lose(self) -> None:
        self._pod.reporting = False
        self._index.drop(self._pod.slot)
        self._changed(self._pod)

    async def _watch(self) -> None:
        stub = rpc.WorkerStub(await self._channel())  # type: ignore[no-untyped-call]
        call = stub.Watch(pb.WatchRequest())
        try:
            while True:
                report = await self._next_report(call)
                if report is grpc.aio.EOF:
                    return
                self._apply_report(report)
        finally:
            call.cancel()

    async def _next_report(self, call: Any) -> Any:
        """Read one report. Raises TimeoutError when the pod sends none for `timeout_s`.

        The wait has two halves. If this process itself was suspended, the first half ends at once, and the second half
        reads the reports that arrived in the meantime.
        """
        read = asyncio.create_task(read_message(call))
        for _ in range(2):
            done, _ = await asyncio.wait({read}, timeout=self._timeout_s / 2)
            if done:
                return read.result()
        read.cancel()
        raise TimeoutError

    def _apply_report(self, report: pb.WorkerReport) -> None:
        pod, load = self._pod, report.load
        was = pod.live
        if report.HasField("info"):
            self._apply_info(report.info)
        if report.HasField("load"):
            pod.draining = load.draining
            pod.requests.report(load.running + load.waiting)
            work = load.queued_prefill_work
            pod.prefill_tokens.report(round(work) if 0 < work < _MOST_WORK else load.queued_prefill_tokens)
            pod.blocks_held = load.blocks_held
            self._apply_times(load)
            if 0 <= load.exposed_handover_s < _MOST_EXPOSED_S:
                pod.note_handovers(load.handed_over_tokens, load.exposed_handover_s)
        if report.HasField("cache"):
            self._apply_cache(report.cache)
        if report.HasField("info") or pod.live != was:
            self._changed(pod)

    def _apply_times(self, load: pb.WorkerLoad) -> None:
        pod, times = self._pod, load.prefill_times
        if _LEAST_TOKEN_S < times.token_s < _MOST_TOKEN_S and 0 <= times.pair_s <= times.token_s:
            pod.prefill_rate, pod.context_cost = 1 / times.token_s, times.pair_s / times.token_s
        elif rate := _sound_rate(load.prefill_rate):
            # A pod of an older version reports one rate for prompts with and without context.
            pod.prefill_rate, pod.context_cost = rate, 0.0

    def _apply_cache(self, changes: pb.CacheChanges) -> None:
        slot = self._pod.slot
        if changes.snapshot:
            self._index.drop(slot)
        self._index.lose(slot, changes.lost)
        self._index.gain(slot, changes.gained)

    def _apply_info(self, info: pb.WorkerInfo) -> None:
        if info.role != self._role:
            log.error("pod has the wrong role", extra={"pod": self._pod.address, "role": pb.Role.Name(info.role)})
            raise WrongPodError("wrong role")
        pod = self._pod
        if not info.cache_scopes:
            if self._require_cache_scopes:
                raise WrongPodError("the pod shares its prefix cache among tenants, and --require-cache-scopes is set")
            log.warning(
                "pod of an older version shares its prefix cache among tenants",
                extra={"event": "shared_prefix_cache", "pod": pod.address, "revision": info.revision},
            )
        if pod.epoch != info.epoch:
            # The pod has restarted, so failures and rates of its former process no longer count.
            pod.epoch, pod.breaker, pod.learned_rate = info.epoch, Breaker(), 0.0
            pod.handed_over_tokens, pod.exposed_handover_s, pod.handover_token_s = 0, 0.0, None
        pod.revision = info.revision
        pod.fingerprint = info.fingerprint
        pod.max_model_len = info.max_model_len
        pod.vocab_size = info.vocab_size
        pod.block_size = info.block_size
        pod.num_blocks = info.num_blocks
        pod.table_windows = tuple(info.table_windows) or (0,)
        pod.prefill_rate = _sound_rate(info.prefill_rate)
        pod.token_bytes = info.token_bytes
        pod.step_tokens = info.step_tokens
        pod.cache_scopes = info.cache_scopes
        pod.reporting = True
        log.info(
            "pod found",
            extra={"pod": pod.address, "role": pb.Role.Name(info.role), "revision": info.revision, "epoch": info.epoch},
        )


def _sound_rate(rate: float) -> float:
    """Return a reported prefill rate, or 0 for one that no pod can have. NaN would disturb routing for all."""
    return rate if 1 / _MOST_TOKEN_S < rate < 1 / _LEAST_TOKEN_S else 0.0
