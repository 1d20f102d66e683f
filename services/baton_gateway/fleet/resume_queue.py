"""Queues requests that lost their decode pod, or were refused by it, until another pod can take them."""

import asyncio
import random
from typing import Protocol

BATCH = 16  # requests that are sent in one step
STEP_S = 0.01
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 2.0


class Waiter(Protocol):
    """A request that waits for a decode pod."""

    def try_start(self) -> bool:
        """Send the request to a pod. Return False when no pod can take it."""
        ...


class ResumeQueue:
    """Sends waiting requests to pods, first come first served and at most BATCH in each STEP_S.

    A request that no pod can take is set aside until a pod changes. In case the gateway misses a change, BATCH of these
    requests are retried after a backoff. The backoff doubles from FIRST_PAUSE_S to LAST_PAUSE_S and is shortened at
    random, so that gateways do not retry in step. `Leg` has the timer that ends the wait of a request.
    """

    def __init__(self) -> None:
        self._ready: dict[Waiter, None] = {}  # in the order in which they came
        self._set_aside: dict[Waiter, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = FIRST_PAUSE_S

    def __len__(self) -> int:
        return len(self._ready) + len(self._set_aside)

    def add(self, waiter: Waiter) -> None:
        if not self._ready:
            self._schedule(0.0)
        self._ready[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        """Remove a request if it is still queued."""
        self._ready.pop(waiter, None)
        self._set_aside.pop(waiter, None)

    def pods_changed(self) -> None:
        """Try all requests again, since a pod that can take them may have come."""
        self._pause_s = FIRST_PAUSE_S
        if self._set_aside:
            self._ready = {**self._set_aside, **self._ready}  # the requests that were set aside have waited longer
            self._set_aside = {}
            self._schedule(0.0)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, delay_s: float) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._step)

    def _step(self) -> None:
        self._timer = None
        retrying = not self._ready
        if retrying:
            self._ready = dict.fromkeys(list(self._set_aside)[:BATCH])
            self._set_aside = {waiter: None for waiter in self._set_aside if waiter not in self._ready}
        started = False
        try:
            for _ in range(BATCH):
                waiter = next(iter(self._ready), None)
                if waiter is None:
                    break
                del self._ready[waiter]
                if waiter.try_start():
                    started = True
                else:
                    self._set_aside[waiter] = None
        finally:
            if retrying and started:
                self.pods_changed()
            if self._ready:
                self._schedule(STEP_S)
            elif self._set_aside:
                self._schedule(self._pause_s * random.uniform(0.5, 1))
                self._pause_s = min(self._pause_s * 2, LAST_PAUSE_S)
