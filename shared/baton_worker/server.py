"""The RPC process of a worker pod: engine, gRPC server, health, signals, drain."""

import asyncio
import logging
import secrets
import signal
import sys
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from baton_common.logging import configure_logging
from baton_common.peer_rpc import bind, make_server
from baton_common.peer_tls import PeerTls, PeerTlsError
from baton_common.peer_token import PeerTokenError
from baton_engine.config import ConfigError
from baton_engine.delta import Load
from baton_kv.pieces import MESSAGE_OVERHEAD
from baton_proto import serving_pb2 as pb
from baton_proto.serving_pb2_grpc import add_WorkerServicer_to_server

from .cache_view import CacheView
from .engine_client import EngineClient, EngineDied
from .messages import Output, Ready
from .metrics import WorkerCollector
from .metrics_server import MetricsServer
from .report import Reporter
from .request_metrics import RequestMetrics
from .settings import WorkerSettings
from .wire_checks import most_message_bytes

if TYPE_CHECKING:
    from baton_common.tracing import Tracing

log = logging.getLogger(__name__)

_HAND_BACK_S = 1.0
_HANDLERS_END_S = 0.1
_MOST_STREAMS = 32


class Service(Protocol):
    """The part of a worker that differs between prefill and decode pods."""

    draining: bool
    events: Counter[str]  # as WorkerLoad.handover_events

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the role's gRPC services."""

    def take(self, output: Output) -> None:
        """Act on an output of the engine."""

    @property
    def num_active(self) -> int:
        """Requests or hand-overs that a drain waits for."""

    @property
    def num_tickets(self) -> int: ...

    @property
    def handed_over_tokens(self) -> int: ...

    @property
    def exposed_handover_s(self) -> float: ...

    def hand_back(self) -> None:
        """End all active requests or hand-overs, so that another pod can continue them."""

    async def stop(self) -> None:
        """End this part's tasks and connections."""


class ServiceFactory(Protocol):
    def __call__(
        self, engine: EngineClient, epoch: int, metrics: RequestMetrics, tracing: "Tracing | None"
    ) -> Service: ...


class WorkerServer:
    """Runs a worker pod until a signal comes or the engine ends."""

    def __init__(self, settings: WorkerSettings, role: pb.Role, make_service: ServiceFactory) -> None:
        self._settings = settings
        self._role = role
        self._name = role_name(role)
        self._make_service = make_service
        self._epoch = secrets.randbits(63)
        self._load = Load(0, 0, 0, 0, 0, 0, 0, 0)
        self._cache = CacheView()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        settings = self._settings
        tls, token = settings.peer_tls, settings.peer_token
        pair_memory = settings.gpu_pair_memory if settings.gpu_pairs else 0.0
        engine = await EngineClient.start(settings.engine_config(), self._name, settings.log_level, pair_memory)
        metrics = RequestMetrics()
        tracing = self._tracing(self._name)
        service = self._make_service(engine, self._epoch, metrics, tracing)
        health = HealthServicer()
        server = make_server(server_options(engine.ready), tls, token, settings.peer_refusals)
        service.add_to(server)
        add_WorkerServicer_to_server(  # type: ignore[no-untyped-call]
            Reporter(self._info(engine), lambda: self._report(service), self._cache), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        port = _bind(server, settings.host, settings.port, tls)
        await server.start()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
        ports = {"port": port, **self._serve_metrics(engine, service, metrics)}
        log.info("serving on %s:%d", settings.host, port, extra={"event": "ready", **ports})
        pump = asyncio.create_task(self._pump(engine, service))
        watch = asyncio.create_task(engine.watch(settings.engine_timeout_s))
        following = asyncio.create_task(settings.follow_peer_files())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([pump, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not pump.done():
            await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            await self._drain(service, pump)
        await server.stop(grace=0)
        # That cancels the handlers of open streams without waiting for them. They must end before the event loop does.
        await asyncio.sleep(_HANDLERS_END_S)
        await service.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.stop)
        stopping.cancel()
        watch.cancel()
        following.cancel()
        if pump.done():
            pump.result()
        pump.cancel()
        await engine.stop()

    def _tracing(self, name: str) -> "Tracing | None":
        settings = self._settings
        if not settings.otlp_endpoint:
            return None
        from baton_common.tracing import Tracing

        # The share 0.0 means that a worker records only the traces that a gateway has begun.
        return Tracing(name, settings.otlp_endpoint, 0.0, {"baton.revision": settings.revision})

    def _serve_metrics(self, engine: EngineClient, service: Service, metrics: RequestMetrics) -> dict[str, int]:
        settings = self._settings
        if settings.metrics_port is None:
            return {}
        collector = WorkerCollector(
            settings.model_name,
            settings.revision,
            self._name,
            engine.ready,
            metrics,
            lambda: self._load,
            service,
            settings.peer_refusals,
        )
        try:
            server = MetricsServer(
                collector.registry(), settings.host, settings.metrics_port, lambda: not self._stopping.is_set()
            )
        except OSError as error:
            raise ConfigError(f"metrics port {settings.metrics_port} cannot be bound: {error.strerror}") from None
        return {"metrics_port": server.server_port}

    async def _pump(self, engine: EngineClient, service: Service) -> None:
        async for output in engine.outputs():
            if output.load is not None:
                self._load = output.load
            self._cache.update(output.blocks_gained, output.blocks_lost)
            service.take(output)

    async def _drain(self, service: Service, pump: "asyncio.Task[None]") -> None:
        """Refuse new requests, and wait for running ones within the grace period. Hand back those that are left."""
        service.draining = True
        log.info("draining %d requests", service.num_active, extra={"event": "draining"})
        await self._until_inactive(service, pump, self._settings.drain_seconds)
        service.hand_back()
        await self._until_inactive(service, pump, _HAND_BACK_S)

    @staticmethod
    async def _until_inactive(service: Service, pump: "asyncio.Task[None]", timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while service.num_active and not pump.done() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    def _info(self, engine: EngineClient) -> pb.WorkerInfo:
        ready = engine.ready
        return pb.WorkerInfo(
            role=self._role,
            model=self._settings.model_name,
            revision=self._settings.revision,
            epoch=self._epoch,
            fingerprint=ready.fingerprint,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            block_size=ready.block_size,
            num_blocks=ready.num_blocks,
            prefill_rate=ready.prefill_rate,
            token_bytes=ready.layout.token_bytes,
            step_tokens=ready.step_tokens,
            cache_scopes=True,
            table_windows=[group.window or 0 for group in ready.layout.groups],
        )

    def _report(self, service: Service) -> pb.WorkerLoad:
        load = self._load
        return pb.WorkerLoad(
            running=load.running,
            waiting=load.waiting,
            blocks_held=load.blocks_held,
            blocks_cached=load.blocks_cached,
            tickets=service.num_tickets,
            queued_prefill_tokens=load.queued_prefill_tokens,
            preemptions=load.preemptions,
            prefix_queries=load.prefix_queries,
            prefix_hits=load.prefix_hits,
            draining=service.draining,
            handover_events=service.events,
            handed_over_tokens=service.handed_over_tokens,
            exposed_handover_s=service.exposed_handover_s,
            prefill_rate=load.prefill_rate,
            prefill_times=pb.PrefillTimes(token_s=load.token_s, pair_s=load.pair_s),
            queued_prefill_work=load.queued_prefill_work,
        )


def role_name(role: pb.Role) -> str:
    name: str = pb.Role.Name(role)
    return name.removeprefix("ROLE_").lower()


def server_options(ready: Ready) -> list[tuple[str, int]]:
    """Return the gRPC options of a worker's port, which receives requests and tickets but no KV pieces."""
    options = dict(channel_options(ready.slot_bytes))
    options["grpc.max_receive_message_length"] = most_message_bytes(ready.max_model_len)
    # A correct peer has only a few streams on each connection.
    options["grpc.max_concurrent_streams"] = _MOST_STREAMS
    return list(options.items())


def channel_options(piece_bytes: int) -> list[tuple[str, int]]:
    """Return gRPC options that allow messages of piece_bytes of KV and notice dead peers in about ten seconds."""
    limit = piece_bytes + MESSAGE_OVERHEAD
    return [
        ("grpc.max_receive_message_length", max(limit, 64 << 20)),
        ("grpc.max_send_message_length", max(limit, 64 << 20)),
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # In gRPC, at least up to 1.85, only this option limits the wait for a ping's answer. Its default is one minute.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        # Several pods on one host may use the same port range, so a port that is taken must be an error.
        ("grpc.so_reuseport", 0),
    ]


def _bind(server: grpc.aio.Server, host: str, port: int, tls: PeerTls | None) -> int:
    try:
        return bind(server, f"{host}:{port}", tls)
    except RuntimeError:
        raise ConfigError(f"port {port} on {host} cannot be bound; is it taken?") from None


def _lower_peer_errors(record: logging.LogRecord) -> bool:
    """Lower two errors of gRPC to infos: a peer left in the middle of a message, or sent one that cannot be parsed."""
    if str(record.msg).startswith(("ExecuteBatchError raised in core", "Exception deserializing message")):
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
    return True


def run_worker(settings: WorkerSettings, role: pb.Role, make_service: ServiceFactory) -> None:
    """Run a worker pod's RPC process. Exits with status 1 and one clear message when it cannot serve."""
    configure_logging(role_name(role), settings.log_level)
    for name in ("grpc._cython.cygrpc", "grpc._common"):
        logging.getLogger(name).addFilter(_lower_peer_errors)

    async def run() -> None:
        await WorkerServer(settings, role, make_service).run()

    try:
        asyncio.run(run())
    except (ConfigError, PeerTlsError, PeerTokenError, EngineDied) as error:
        log.error("%s", error, extra={"event": "fatal"})
        sys.exit(1)
