"""The pods of one role on a simulated clock: pods need time to start, and finish their requests before they stop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from baton_gateway.routing.pods import Pod
from loadtest.common.sim_pod import Clock, SimPod


class Phase(Enum):
    OFF = "off"
    STARTING = "starting"
    LIVE = "live"
    DRAINING = "draining"


@dataclass
class Member:
    """A pod, or the place for one. known: what the gateway knows of it; blocks_held: of KV, by requests."""

    known: Pod
    sim: SimPod
    phase: Phase = Phase.OFF
    started: float = 0.0
    blocks_held: int = 0
    requests: int = 0  # requests on the pod or on their way to it


class SimFleet:
    """The pods of one role, as many as a scaler asks for."""

    def __init__(
        self,
        clock: Clock,
        known: Sequence[Pod],
        make: Callable[[], SimPod],
        start_s: float,
        gone: Callable[[int], None],
    ) -> None:
        """known: a place for each pod, draining ones included. gone: told the slot of a pod that has left."""
        self.members = [Member(pod, make()) for pod in known]
        self.pod_seconds = 0.0
        self.changes = 0
        self._clock = clock
        self._make = make
        self._start_s = start_s
        self._gone = gone

    def begin(self, count: int) -> None:
        """Start with this number of live pods."""
        for member in self.members[:count]:
            member.started = self._clock.now
            self._turn_live(member)

    @property
    def replicas(self) -> int:
        return sum(member.phase in (Phase.STARTING, Phase.LIVE) for member in self.members)

    @property
    def live(self) -> list[Member]:
        return [member for member in self.members if member.phase is Phase.LIVE]

    def scale(self, count: int) -> None:
        now = self._clock.now
        self.changes += count != self.replicas
        for member in [member for member in self.members if member.phase is Phase.OFF][: count - self.replicas]:
            member.phase, member.started = Phase.STARTING, now
            self._clock.at(now + self._start_s, lambda member=member: self._started(member))  # type: ignore[misc]
        while self.replicas > count:
            # As in a ReplicaSet, pods that are not ready are removed first, then the youngest.
            candidates = [member for member in self.members if member.phase in (Phase.STARTING, Phase.LIVE)]
            leaving = max(candidates, key=lambda member: (member.phase is Phase.STARTING, member.started))
            self._leave(leaving)

    def done(self, member: Member) -> None:
        """Record that a request of a pod has ended."""
        member.requests -= 1
        if member.phase is Phase.DRAINING and not member.requests:
            self._turn_off(member)

    def finish(self) -> None:
        """Add the time of the pods that still exist."""
        for member in self.members:
            if member.phase is not Phase.OFF:
                self.pod_seconds += self._clock.now - member.started

    def _started(self, member: Member) -> None:
        if member.phase is Phase.STARTING and self._clock.now - member.started >= self._start_s - 1e-9:
            self._turn_live(member)

    def _turn_live(self, member: Member) -> None:
        member.sim = self._make()
        member.phase = Phase.LIVE
        member.known.reporting = True

    def _leave(self, member: Member) -> None:
        member.known.reporting = False
        if member.requests:
            member.phase = Phase.DRAINING
        else:
            self._turn_off(member)

    def _turn_off(self, member: Member) -> None:
        self.pod_seconds += self._clock.now - member.started
        member.phase = Phase.OFF
        self._gone(member.known.slot)
