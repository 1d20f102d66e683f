"""A gateway before prefill and decode workers that are started again whenever they end, as Kubernetes would."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil

from baton_cli.ports import free_loopback_ports
from tests.e2e.pod import Pod
from tests.e2e.process import Process
from tests.e2e.workers import Role

from .service import Service, is_error, read_log
from .tcp import TcpProxy
from .wire import WireProxy

MODEL_NAME = "model"
LEASE_S = 2.0
WORKER_TIMEOUT_S = 1.5
DRAIN_S = 0.3
ROLES: tuple[Role, ...] = ("prefill", "decode")
WORKERS_PER_ROLE = 3
_START_S = 90
_POLL_S = 0.05
# What the gateway has noticed is in its log by then.
_NOTICE_S = 0.3
_FULL_DISK = Path("/dev/full")
_WORKER: dict[str, Any] = {
    "num_threads": 1,
    "num_blocks": 512,
    "max_num_batched_tokens": 48,
    "drain_seconds": DRAIN_S,
}
_TRANSPORTS = "grpc", "tcp", "auto"


class Member:
    """One place in the fleet: a worker at a fixed address, and the proxies in front of it.

    Before a decode worker stands a TCP proxy; before a prefill worker one that knows its calls, and a TCP proxy before
    that. KV comes over gRPC to the first decode worker, over TCP to the second, and as it will to the third.
    """

    def __init__(self, role: Role, index: int, port: int, model: Path, logs: Path) -> None:
        self.name = f"{role}-{index}"
        self.role = role
        self.pod = Pod(f"127.0.0.1:{port}")
        self.wire = WireProxy(self.pod.address) if role == "prefill" else None
        self.tcp = TcpProxy()
        self.address = ""  # where the other pods find the worker
        self.log = logs / f"{self.name}.log"
        self.logs = True  # false while the disk of its log is full
        self.next_log_lost = False  # the same, for the next process
        self.engine_kills = 0  # that are in its log
        self.wrong_ends: list[str] = []
        self.past: list[int] = []  # process groups of those that have ended
        self.alone = asyncio.Lock()  # held by who stops or ends the process
        self._port = port
        self._settings = {**_WORKER, "model": model, "port": port}
        if role == "decode":
            self._settings |= {"lease_seconds": LEASE_S, "kv_transport": _TRANSPORTS[index]}
        self._doomed = False
        self._service: Service | None = None
        self._serving = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def service(self) -> Service:
        assert self._service is not None
        return self._service

    async def start(self) -> None:
        """Start the proxies and the worker, and keep it running from now on."""
        if self.wire is None:
            self.address = await self.tcp.front(self.pod.address)
        else:
            await self.wire.start()
            self.address = await self.tcp.front(self.wire.address)
            self.wire.bulk_port = int((await self.tcp.front(self.wire.bulk_address)).rpartition(":")[2])
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._service is not None:
            await self._service.kill()
        await self.tcp.stop()
        if self.wire is not None:
            await self.wire.stop()

    async def serving(self) -> None:
        """Return when the worker answers."""
        async with asyncio.timeout(_START_S):
            await self._serving.wait()

    def doom(self) -> Service:
        """Return the process, which is about to be ended."""
        self._doomed = True
        self._serving.clear()
        return self.service

    def kill_engine(self) -> None:
        """Kill the worker's engine process, which ends the worker."""
        [engine] = psutil.Process(self.service.pid).children()
        self.doom()
        self.engine_kills += self.logs
        engine.kill()

    async def _keep(self) -> None:
        while True:
            self.logs = not self.next_log_lost
            self.next_log_lost = False
            output = self.log if self.logs else _FULL_DISK
            self._service = await Service.start(output, self.role, self._settings)
            await self._until_serving()
            status = await self._service.ended()
            self._serving.clear()
            self.past.append(self._service.pid)
            if not self._doomed:
                self.wrong_ends.append(f"{self.name} has ended by itself with status {status}")
            self._doomed = False

    async def _until_serving(self) -> None:
        async with asyncio.timeout(_START_S):
            while self.service.alive and not await self._listens():
                await asyncio.sleep(_POLL_S)
            if self.service.alive:
                await self.pod.info()
                self._serving.set()

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        writer.close()
        return True


class Fleet:
    """All members, the gateway, and an HTTP client for it."""

    def __init__(self, gateway: Process, port: int, admin_port: int, members: list[Member]) -> None:
        self.gateway = gateway
        self._metrics_url = f"http://127.0.0.1:{admin_port}/metrics"
        self.members = members
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=None, limits=httpx.Limits(max_connections=None)
        )
        self._disturbed: dict[str, int] = {}  # by member
        self._bare_until = 0.0
        self._lines_read = 0
        self._found: dict[str, bool] = {}  # by address, what the gateway has last said

    @classmethod
    async def start(cls, model: Path, logs: Path) -> "Fleet":
        """Start everything, and wait until it serves."""
        ports = free_loopback_ports(2 * WORKERS_PER_ROLE + 2)
        port, admin_port = ports.pop(), ports.pop()
        members = [Member(role, index, ports.pop(), model, logs) for role in ROLES for index in range(WORKERS_PER_ROLE)]
        await asyncio.gather(*(member.start() for member in members))
        addresses = {role: ",".join(member.address for member in members if member.role == role) for role in ROLES}
        gateway = await Process.start(
            *("gateway", "--model", str(model), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin_port)),
            *("--worker-timeout-s", str(WORKER_TIMEOUT_S)),
            *("--decode-addresses", addresses["decode"], "--prefill-addresses", addresses["prefill"]),
        )
        fleet = cls(gateway, port, admin_port, members)
        try:
            await asyncio.gather(*(member.serving() for member in members))
            await fleet.whole()
        except BaseException:
            await fleet.stop()
            raise
        return fleet

    async def stop(self) -> None:
        await self.http.aclose()
        await self.gateway.kill()
        await asyncio.gather(*(member.stop() for member in self.members))

    def of(self, role: Role) -> list[Member]:
        return [member for member in self.members if member.role == role]

    @property
    def problems(self) -> list[str]:
        """What ought not to have happened to the processes."""
        ends = [end for member in self.members for end in member.wrong_ends]
        return ends if self.gateway.alive else [*ends, "the gateway has ended"]

    def errors(self) -> list[str]:
        """Return what was logged as an error and does not follow from a fault."""
        found = []
        for member in self.members:
            deaths = member.engine_kills
            for line in read_log(member.log) if member.log.exists() else ():
                if line.get("event") == "fatal" and deaths:
                    deaths -= 1
                elif is_error(line):
                    found.append(f"{member.name}: {line}")
        return found + [f"gateway: {line}" for line in self.gateway.lines if is_error(line)]

    async def failed_handovers(self) -> int:
        """Return how many hand-overs the decode workers of now have given up."""
        loads = await asyncio.gather(*(member.pod.load() for member in self.of("decode")))
        return sum(load.handover_events["failed"] for load in loads)

    def lines_about(self, request_id: str) -> list[str]:
        """Return what was logged about a request, in no order but that of each process."""
        logs = {member.name: read_log(member.log) for member in self.members if member.log.exists()}
        logs["gateway"] = iter(self.gateway.lines)
        return [
            f"{name}: {line}" for name, lines in logs.items() for line in lines if line.get("request_id") == request_id
        ]

    async def state(self) -> str:
        """Return what the gateway and each worker now report of themselves."""
        text = (await self.http.get(self._metrics_url, timeout=10)).text
        lines = [line for line in text.splitlines() if "_bucket" not in line and not line.endswith((" 0.0", " 0"))]
        found = [f"gateway: {line}" for line in lines if line.startswith("baton_gateway")]
        for member in self.members:
            try:
                load = await asyncio.wait_for(member.pod.load(), 3)
            except (TimeoutError, AssertionError, grpc.aio.AioRpcError) as error:
                found.append(f"{member.name}: {error!r}")
            else:
                found.append(f"{member.name}: {' '.join(str(load).split())}")
        return "\n".join(found)

    def events(self) -> Counter[str]:
        """Count what the workers have logged, by event."""
        logs = [member.log for member in self.members if member.log.exists()]
        return Counter(line["event"] for log in logs for line in read_log(log) if "event" in line)

    def survivors(self) -> list[psutil.Process]:
        """Return processes that have outlived the worker that started them."""
        past = {group for member in self.members for group in member.past}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                found += [process] if os.getpgid(process.pid) in past else []
        return found

    @contextlib.asynccontextmanager
    async def disturbance(self, member: Member) -> AsyncIterator[None]:
        """A time in which a worker may not serve; it lasts until the worker does, and the gateway knows it."""
        self._disturbed[member.name] = self._disturbed.get(member.name, 0) + 1
        try:
            yield
            await member.serving()
            await self._noticed(member)
        finally:
            if self._bare:
                self._bare_until = asyncio.get_running_loop().time()
            self._disturbed[member.name] -= 1

    def was_bare(self, since: float) -> bool:
        """Whether there was a moment without any undisturbed decode worker; since: in the event loop's seconds."""
        return self._bare or self._bare_until >= since

    async def whole(self) -> None:
        """Wait until the gateway finds every worker alive."""
        async with asyncio.timeout(_START_S):
            pool = f'model="{MODEL_NAME}",pool="default"'
            while [await self.metric(f'live_pods{{{pool},role="{role}"}}') for role in ROLES] != [WORKERS_PER_ROLE] * 2:
                await asyncio.sleep(_POLL_S)

    async def idle(self) -> None:
        """Wait until nothing is held anywhere."""
        await asyncio.gather(*(member.pod.idle() for member in self.members))
        async with asyncio.timeout(10):
            while await self.metric("requests_in_flight"):
                await asyncio.sleep(_POLL_S)

    async def metric(self, name: str) -> float:
        """Return the value of one of the gateway's metrics."""
        lines = (await self.http.get(self._metrics_url, timeout=10)).text.splitlines()
        values = [float(line.split()[1]) for line in lines if line.startswith(f"baton_gateway_{name} ")]
        return values[0] if values else 0.0

    @property
    def _bare(self) -> bool:
        return all(self._disturbed.get(member.name) for member in self.of("decode"))

    async def _noticed(self, member: Member) -> None:
        await asyncio.sleep(_NOTICE_S)
        async with asyncio.timeout(_START_S):
            while not self._finds(member.address):
                await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_NOTICE_S)

    def _finds(self, address: str) -> bool:
        """Whether the gateway's last word about a worker is that it is there."""
        for line in self.gateway.lines[self._lines_read :]:
            if line["message"] in ("pod found", "pod lost"):
                self._found[line["pod"]] = line["message"] == "pod found"
        self._lines_read = len(self.gateway.lines)
        return self._found.get(address, False)
