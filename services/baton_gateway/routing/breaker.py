"""Leaves a pod out for a while after repeated failures. Plain state; the caller brings the clock."""

from dataclasses import dataclass
from typing import Literal

FAILURES = 3  # one after another, that open it
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0

State = Literal["closed", "open", "half_open"]


@dataclass(slots=True, eq=False)
class Breaker:
    """Closed: requests pass. Open: none. After a pause one may try, and its outcome closes or opens it again."""

    failures: int = 0
    open_until: float = 0.0  # seconds
    trying: bool = False

    def state(self, now: float) -> State:
        """half_open: one request may try, or does."""
        if self.failures < FAILURES:
            return "closed"
        return "half_open" if now >= self.open_until else "open"

    def allows(self, now: float) -> bool:
        return self.failures < FAILURES or (now >= self.open_until and not self.trying)

    def admit(self) -> bool:
        """Note a request that is sent; return whether it is the one to try."""
        if self.failures < FAILURES or self.trying:
            return False
        self.trying = True
        return True

    def release(self) -> None:
        """The request that was to try ends without an outcome."""
        self.trying = False

    def succeed(self) -> None:
        self.failures, self.trying = 0, False

    def fail(self, now: float) -> None:
        # What was under way when it opened fails with the same cause, and says nothing new.
        if self.failures >= FAILURES and now < self.open_until:
            return
        self.trying = False
        self.failures += 1
        if self.failures >= FAILURES:
            # The exponent is bounded, as a float is.
            self.open_until = now + min(FIRST_PAUSE_S * 2 ** min(self.failures - FAILURES, 16), LAST_PAUSE_S)
