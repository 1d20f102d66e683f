"""The control loop: fetches the gateways' reports, then reconciles canaries and replicas."""

import asyncio
import logging
import time
from collections.abc import Awaitable

import urllib3
from kubernetes.client import ApiException

from baton_controller.canary_reconciler import CanaryReconciler
from baton_controller.config_follower import ConfigFollower
from baton_controller.gateways import Gateways
from baton_controller.metrics import Metrics
from baton_controller.scaler import Scaler

log = logging.getLogger(__name__)

# The controller counts as stuck after this many intervals without a reconciliation, plus a minute for calls that hang.
_LATE_INTERVALS = 5
_HANG_S = 60.0


class Controller:
    """The control loop; `run` returns after `stop`."""

    def __init__(
        self,
        config: ConfigFollower,
        gateways: Gateways,
        canaries: CanaryReconciler,
        scaler: Scaler,
        metrics: Metrics,
        interval_s: float,
    ) -> None:
        self._config = config
        self._gateways = gateways
        self._canaries = canaries
        self._scaler = scaler
        self._metrics = metrics
        self._interval_s = interval_s
        self._stopping = asyncio.Event()
        self._last_reconciled: float | None = None
        self._begun = time.monotonic()
        self._failing: set[str] = set()

    @property
    def live(self) -> bool:
        last = self._last_reconciled or self._begun
        return time.monotonic() - last < _LATE_INTERVALS * self._interval_s + _HANG_S

    @property
    def ready(self) -> bool:
        return self._last_reconciled is not None

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        self._gateways.start()
        try:
            while not self._stopping.is_set():
                await self._reconcile()
                await self._within(self._stopping.wait())
        finally:
            self._gateways.stop()

    async def _reconcile(self) -> None:
        self._config.follow()
        # Before the API server has listed the gateways, an empty set of reports does not mean that there are none.
        if await self._within(self._gateways.wait_until_listed()):
            reports = await self._gateways.fetch_reports()
            self._metrics.gateways.set(len(reports))
            config = self._config.current
            await self._try("canaries", asyncio.to_thread(self._canaries.reconcile, config, reports, time.time()))
            weights = dict(self._canaries.weights)
            await self._try(
                "replicas", asyncio.to_thread(self._scaler.reconcile, config, reports, time.monotonic(), weights)
            )
            self._metrics.last_reconciled.set(time.time())
        self._last_reconciled = time.monotonic()

    async def _try(self, what: str, call: Awaitable[None]) -> None:
        try:
            await call
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            why = f"{error.status} {error.reason}" if isinstance(error, ApiException) else str(error)
            if what not in self._failing:
                log.warning("%s cannot be reconciled: %s", what, why, extra={"event": "kubernetes_failed"})
            self._failing.add(what)
        else:
            if what in self._failing:
                log.info("%s are reconciled again", what, extra={"event": "kubernetes_works"})
            self._failing.discard(what)

    async def _within(self, wait: Awaitable[object]) -> bool:
        try:
            await asyncio.wait_for(wait, self._interval_s)
        except TimeoutError:
            return False
        return True
