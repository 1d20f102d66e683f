"""Keeps requests away from a pod for a while after repeated failures. The caller passes the time."""

from dataclasses import dataclass
from typing import Literal

FAILURES = 3  # failures in a row that open a breaker
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0

State = Literal["closed", "open", "half_open"]


@dataclass(slots=True, eq=False)
class Breaker:
    """Closed: requests pass. Open: no request passes. Half-open, after a pause: one trial request passes, whose outcome
    closes the breaker or opens it again."""

    failures: int = 0
    open_until: float = 0.0  # seconds
    trying: bool = False

    def state(self, now: float) -> State:
        """Return the state. half_open: one trial request may pass, or has passed and has no outcome yet."""
        if self.failures < FAILURES:
            return "closed"
        return "half_open" if now >= self.open_until else "open"

    def allows(self, now: float) -> bool:
        return self.failures < FAILURES or (now >= self.open_until and not self.trying)

    def admit(self) -> bool:
        """Note a request that is sent to the pod, and return whether it is the trial request."""
        if self.failures < FAILURES or self.trying:
            return False
        self.trying = True
        return True

    def release(self) -> None:
        """Note that the trial request ended without an outcome, so that another request may try."""
        self.trying = False

    def succeed(self) -> None:
        self.failures, self.trying = 0, False

    def fail(self, now: float) -> None:
        # Requests that were under way when the breaker opened fail for the same reason, and must not prolong the pause.
        if self.failures >= FAILURES and now < self.open_until:
            return
        self.trying = False
        self.failures += 1
        if self.failures >= FAILURES:
            # The exponent is bounded so that the power stays a finite float.
            self.open_until = now + min(FIRST_PAUSE_S * 2 ** min(self.failures - FAILURES, 16), LAST_PAUSE_S)
