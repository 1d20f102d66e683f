"""Builds the parts of a gateway from its settings, and starts and stops them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .answers.reply_maker import ReplyMaker
from .concurrency.turns import Turns
from .endpoints.services import Services
from .fleet.canary_file import CanaryFile
from .fleet.catalog import Catalog
from .fleet.pool_metrics import PoolMetrics
from .settings import GatewaySettings
from .telemetry.metrics import Metrics
from .tenancy.limits.redis_store import RedisLimits, connect
from .tenancy.quota import Quota
from .tenancy.tenants import Tenants

if TYPE_CHECKING:
    from baton_common.tracing import Tracing

    from .fleet.discovery import Discovery
    from .telemetry.genai_metrics import GenAiMetrics


class Gateway:
    """The parts of a gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        catalog: Catalog,
        tracing: "Tracing | None" = None,
        genai: "GenAiMetrics | None" = None,
    ) -> None:
        """Raises TenantsError, CanaryError, KubernetesError."""
        self.settings = settings
        self.catalog = catalog
        self._telemetry = [part for part in (tracing, genai) if part is not None]
        self._followers = list(_followers(settings, catalog))
        self._following_peer_files: asyncio.Task[None] | None = None
        redis = connect(settings.redis_url.get_secret_value()) if settings.redis_url else None
        static = [key.get_secret_value() for key in settings.api_keys]
        self.tenants = Tenants(settings.tenants_file, static, redis)
        self.quota = Quota(RedisLimits(redis) if redis is not None else None, settings.redis_lost)
        self.turns = Turns(settings.tokenizer_threads)
        self.metrics = Metrics([model.name for model in catalog], self.tenants, self.quota, genai)
        self.metrics.registry.register(PoolMetrics(catalog))
        catalog.register(self.metrics.registry)
        replies = ReplyMaker(settings, self.metrics, tracing)
        self.services = Services(settings, self.tenants, self.quota, self.turns, catalog, self.metrics, replies)
        self.metrics.draining.set_function(lambda: self.services.draining)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the parts while requests are served."""
        self.start()
        yield
        await self.stop()

    def start(self) -> None:
        self.catalog.start()
        for follower in self._followers:
            follower.start()
        self._following_peer_files = asyncio.create_task(self.settings.follow_peer_files())
        self.tenants.start()
        self.quota.start()

    async def stop(self) -> None:
        for follower in self._followers:
            follower.stop()
        if self._following_peer_files is not None:
            self._following_peer_files.cancel()
        await self.catalog.stop()
        await self.tenants.stop()
        await self.quota.stop()
        self.turns.close()
        await asyncio.gather(*(asyncio.to_thread(part.stop) for part in self._telemetry))


def _followers(settings: GatewaySettings, catalog: Catalog) -> "Iterator[CanaryFile | Discovery]":
    """Return the objects that keep the lists of pods and canaries up to date."""
    if settings.canary_file is not None:
        yield CanaryFile(settings.canary_file, catalog)
    if settings.canary_configmaps or any(pool.spec.selector for _, pool in catalog.pools):
        # Imported only when it is needed, because importing the Kubernetes client takes a second and 50 MB.
        from .fleet.discovery import Discovery

        yield Discovery(settings, catalog)
