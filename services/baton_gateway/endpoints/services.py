"""The parts of a gateway that requests need."""

from dataclasses import dataclass

from ..concurrency.turns import Turns
from ..fleet.catalog import Catalog
from ..phase import Phase
from ..settings import GatewaySettings
from ..telemetry.metrics import Metrics
from ..tenancy.quota import Quota
from ..tenancy.tenants import Tenants
from .launch import Launcher


@dataclass(frozen=True, slots=True)
class Services:
    """What a request is served with. The gateway builds these parts; requests call them and never the gateway."""

    settings: GatewaySettings
    phase: Phase
    tenants: Tenants
    quota: Quota
    turns: Turns
    catalog: Catalog
    metrics: Metrics
    launcher: Launcher

    @property
    def ready(self) -> bool:
        # While Redis is lost and requests are refused for that, others may still reach it.
        refusing = self.settings.redis_lost == "refuse" and self.tenants.redis_up is False
        return not self.phase.draining and self.catalog.ready and self.tenants.complete and not refusing
