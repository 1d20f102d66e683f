"""Looks at the gateways again and again, and has canaries and replicas follow what they say."""

import asyncio
import logging
import time
from collections.abc import Awaitable

import urllib3
from kubernetes.client import ApiException

from baton_controller.canary import Canary
from baton_controller.config_follower import ConfigFollower
from baton_controller.gateways import Gateways
from baton_controller.metrics import Metrics
from baton_controller.scaler import Scaler

log = logging.getLogger(__name__)

_LATE_LOOKS = 5  # so many intervals without a look, and a minute for calls that hang, mean that it is stuck
_HANG_S = 60.0


class Controller:
    """`run` it until `stop`."""

    def __init__(
        self,
        config: ConfigFollower,
        gateways: Gateways,
        canary: Canary,
        scaler: Scaler,
        metrics: Metrics,
        interval_s: float,
    ) -> None:
        self._config = config
        self._gateways = gateways
        self._canary = canary
        self._scaler = scaler
        self._metrics = metrics
        self._interval_s = interval_s
        self._stopping = asyncio.Event()
        self._last_look: float | None = None
        self._begun = time.monotonic()
        self._failing: set[str] = set()

    @property
    def live(self) -> bool:
        last = self._last_look or self._begun
        return time.monotonic() - last < _LATE_LOOKS * self._interval_s + _HANG_S

    @property
    def ready(self) -> bool:
        return self._last_look is not None

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        self._gateways.start()
        try:
            while not self._stopping.is_set():
                await self._look()
                await self._within(self._stopping.wait())
        finally:
            self._gateways.stop()

    async def _look(self) -> None:
        self._config.follow()
        # Until it is known which gateways there are, none of them having answered means nothing.
        if await self._within(self._gateways.known()):
            reports = await self._gateways.ask()
            self._metrics.gateways.set(len(reports))
            config = self._config.current
            await self._try("canaries", asyncio.to_thread(self._canary.reconcile, config, reports, time.time()))
            weights = dict(self._canary.weights)
            await self._try(
                "replicas", asyncio.to_thread(self._scaler.look, config, reports, time.monotonic(), weights)
            )
            self._metrics.last_look.set(time.time())
        self._last_look = time.monotonic()

    async def _try(self, what: str, call: Awaitable[None]) -> None:
        try:
            await call
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            why = f"{error.status} {error.reason}" if isinstance(error, ApiException) else str(error)
            if what not in self._failing:
                log.warning("%s are not taken care of: %s", what, why, extra={"event": "kubernetes_failed"})
            self._failing.add(what)
        else:
            if what in self._failing:
                log.info("%s are taken care of again", what, extra={"event": "kubernetes_works"})
            self._failing.discard(what)

    async def _within(self, wait: Awaitable[object]) -> bool:
        try:
            await asyncio.wait_for(wait, self._interval_s)
        except TimeoutError:
            return False
        return True
