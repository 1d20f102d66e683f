"""The faults of a fleet. A fault draws its parameters when it is created, so the same seed creates the same faults."""

import asyncio
import contextlib
import random
import signal
from abc import ABC, abstractmethod

from tests.e2e.workers import Role

from .fleet import DRAIN_S, LEASE_S, WORKER_TIMEOUT_S, WORKERS_PER_ROLE, Fleet, Member
from .load import Load
from .tampering import Damage, Tampering
from .wire import WireProxy

# Beyond it gRPC's keepalive gives a silent connection up.
_KEEPALIVE_S = 10.0
# After it a decode worker takes a prefill worker that says nothing for lost.
_SILENCE_S = 5.0
_ANSWER_S = 3.0


class Fault(ABC):
    """One disturbance, with a name for people.

    hits: how often it has met something, once it is over; a fault between requests disturbs nobody.
    """

    name: str
    hits = 1

    @abstractmethod
    async def inject(self, fleet: Fleet, load: Load) -> None:
        """Do it; return when it is over and its target serves again."""

    def __str__(self) -> str:
        return ", ".join([self.name, *self._details()])

    def _details(self) -> list[str]:
        return []


class WorkerFault(Fault):
    """Something that happens to one worker."""

    alone = False  # whether nothing else of this kind may happen to the worker meanwhile

    def __init__(self, rng: random.Random, role: Role) -> None:
        self._role = role
        self._index = rng.randrange(WORKERS_PER_ROLE)

    async def inject(self, fleet: Fleet, load: Load) -> None:
        member = fleet.of(self._role)[self._index]
        async with contextlib.AsyncExitStack() as stack:
            if self.alone:
                await stack.enter_async_context(member.alone)
                await member.serving()
            await stack.enter_async_context(fleet.disturbance(member))
            await self._disturb(member)

    def _details(self) -> list[str]:
        return [f"{self._role}-{self._index}"]

    @abstractmethod
    async def _disturb(self, member: Member) -> None: ...


class ProcessFault(WorkerFault):
    """Something that happens to a worker's processes."""

    alone = True


class Killed(ProcessFault):
    name = "worker killed"

    async def _disturb(self, member: Member) -> None:
        member.doom().send(signal.SIGKILL)


class EngineKilled(ProcessFault):
    name = "engine killed"

    async def _disturb(self, member: Member) -> None:
        member.kill_engine()


class Restarted(ProcessFault):
    """Worker and engine are gone at once; at the same address there is another one soon."""

    name = "worker restarted"

    async def _disturb(self, member: Member) -> None:
        await member.doom().kill()


class Drained(ProcessFault):
    name = "worker drained"

    async def _disturb(self, member: Member) -> None:
        service = member.doom()
        service.send(signal.SIGTERM)
        status = await asyncio.wait_for(service.ended(), DRAIN_S + 10)
        if status:
            member.wrong_ends.append(f"{member.name} has ended its drain with status {status}")


class LogDiskFull(ProcessFault):
    """The worker begins anew and can write no log, until it is started again for another reason."""

    name = "disk of the log full"

    async def _disturb(self, member: Member) -> None:
        member.next_log_lost = True
        await member.doom().kill()


class Stopped(ProcessFault):
    name = "worker stopped"

    def __init__(self, rng: random.Random, role: Role) -> None:
        super().__init__(rng, role)
        self._seconds = rng.choice([rng.uniform(0.3, WORKER_TIMEOUT_S), rng.uniform(WORKER_TIMEOUT_S, 3.0)])

    def _details(self) -> list[str]:
        return [*super()._details(), f"{self._seconds:.2f} s"]

    async def _disturb(self, member: Member) -> None:
        member.service.send_to_group(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            member.service.send_to_group(signal.SIGCONT)


class ConnectionsFrozen(WorkerFault):
    name = "connections frozen"

    def __init__(self, rng: random.Random, role: Role) -> None:
        super().__init__(rng, role)
        longest = rng.choice([WORKER_TIMEOUT_S, WORKER_TIMEOUT_S, 4.0, _KEEPALIVE_S + 2])
        self._seconds = rng.uniform(longest / 2, longest)

    def _details(self) -> list[str]:
        return [*super()._details(), f"{self._seconds:.2f} s"]

    async def _disturb(self, member: Member) -> None:
        with member.tcp.gate.closed():
            await asyncio.sleep(self._seconds)


class ConnectionsAbandoned(WorkerFault):
    """Half-open for good: nothing more comes on the connections that there are, and nobody closes them."""

    name = "connections abandoned"

    async def _disturb(self, member: Member) -> None:
        member.tcp.abandon()
        # Until then those at the other ends may still believe in them.
        await asyncio.sleep(WORKER_TIMEOUT_S if self._role == "decode" else _KEEPALIVE_S + 1)


class ConnectionsCut(WorkerFault):
    name = "connections cut"

    async def _disturb(self, member: Member) -> None:
        member.tcp.cut()


class NoWorkerReached(Fault):
    """The connections of all decode workers freeze: requests that run wait, new ones are refused."""

    name = "no decode worker reached"

    def __init__(self, rng: random.Random) -> None:
        self._seconds = WORKER_TIMEOUT_S + rng.uniform(0.5, 2.0)

    def _details(self) -> list[str]:
        return [f"{self._seconds:.2f} s"]

    async def inject(self, fleet: Fleet, load: Load) -> None:
        async with contextlib.AsyncExitStack() as disturbances:
            for member in fleet.of("decode"):
                await disturbances.enter_async_context(fleet.disturbance(member))
            with contextlib.ExitStack() as gates:
                for member in fleet.of("decode"):
                    gates.enter_context(member.tcp.gate.closed())
                await asyncio.sleep(self._seconds)


class LinkFault(Fault):
    """Something that happens to the links of one prefill worker."""

    def __init__(self, rng: random.Random) -> None:
        self._index = rng.randrange(WORKERS_PER_ROLE)

    async def inject(self, fleet: Fleet, load: Load) -> None:
        wire = fleet.of("prefill")[self._index].wire
        assert wire is not None
        await self._disturb(wire)

    def _details(self) -> list[str]:
        return [f"prefill-{self._index}"]

    @abstractmethod
    async def _disturb(self, wire: WireProxy) -> None: ...


class PiecesDamaged(LinkFault):
    def __init__(self, rng: random.Random, damage: Damage) -> None:
        super().__init__(rng)
        self.name = f"pieces {damage}"
        self._seconds = rng.uniform(0.5, 2.0)
        self._rate = rng.choice([0.2, 0.5, 1.0])
        self._delay_s = rng.choice([0.02, 0.2])
        self._tampering = Tampering(damage, self._rate, self._delay_s, str(rng.random()))

    def _details(self) -> list[str]:
        delay = f" by up to {self._delay_s} s" if self._tampering.damage is Damage.DELAYED else ""
        return [*super()._details(), f"{self._rate:.0%}{delay}", f"{self._seconds:.2f} s"]

    async def _disturb(self, wire: WireProxy) -> None:
        with wire.tampering(self._tampering):
            await asyncio.sleep(self._seconds)
        self.hits = self._tampering.hits


class LinkCut(LinkFault):
    name = "link cut"

    async def _disturb(self, wire: WireProxy) -> None:
        wire.cut()


class LinkCutBetweenLegs(LinkFault):
    """The decode worker has the first token, and never gets the KV."""

    name = "link cut after a first token"

    async def _disturb(self, wire: WireProxy) -> None:
        self.hits = 0
        with wire.pieces_gate.closed(), contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wire.first_tokens(), _ANSWER_S)
            wire.cut()
            self.hits = 1


class LinkHeld(LinkFault):
    name = "link held"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._seconds = rng.uniform(0.2, 1.5)

    def _details(self) -> list[str]:
        return [*super()._details(), f"{self._seconds:.2f} s"]

    async def _disturb(self, wire: WireProxy) -> None:
        with wire.gate.closed():
            await asyncio.sleep(self._seconds)


class LeasesExpired(LinkHeld):
    """Neither KV nor a renewal passes for longer than a lease."""

    name = "leases expired"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._seconds += LEASE_S


class LinkSilent(LinkHeld):
    """As above, for longer than a decode worker listens to silence."""

    name = "link silent"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._seconds += _SILENCE_S


class ClientsLeft(Fault):
    name = "clients left"

    def __init__(self, rng: random.Random) -> None:
        self._count = rng.randint(1, 4)

    def _details(self) -> list[str]:
        return [f"up to {self._count}"]

    async def inject(self, fleet: Fleet, load: Load) -> None:
        self.hits = load.leave(self._count)
