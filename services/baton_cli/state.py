"""The state of a child: its phase and progress."""

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True)
class State:
    """The state of a child. percent: the loading progress. wait_s: seconds until the restart."""

    phase: Phase
    percent: int | None = None
    wait_s: float | None = None

    def __str__(self) -> str:
        if self.percent is not None:
            return f"{self.phase} {self.percent} %"
        if self.wait_s is not None:
            return f"{self.phase} in {self.wait_s:g} s"
        return self.phase
