"""The parts of a gateway that endpoints use."""

from dataclasses import dataclass

from ..answers.reply_maker import ReplyMaker
from ..concurrency.turns import Turns
from ..fleet.catalog import Catalog
from ..settings import GatewaySettings
from ..telemetry.metrics import Metrics
from ..tenancy.quota import Quota
from ..tenancy.tenants import Tenants


@dataclass(slots=True)
class Services:
    """The parts of a gateway that serve a request. The gateway builds them; endpoints call them, never the gateway.

    draining: the gateway is no longer ready, but it still serves requests.
    """

    settings: GatewaySettings
    tenants: Tenants
    quota: Quota
    turns: Turns
    catalog: Catalog
    metrics: Metrics
    replies: ReplyMaker
    draining: bool = False

    @property
    def ready(self) -> bool:
        # A gateway that refuses requests because it lost Redis is not ready: other gateways may still reach Redis.
        refusing = self.settings.redis_lost == "refuse" and self.tenants.redis_up is False
        return not self.draining and self.catalog.ready and self.tenants.complete and not refusing
