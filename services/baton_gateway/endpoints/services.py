"""The parts of a gateway that requests need."""

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
    """What a request is served with. The gateway builds these parts; requests call them and never the gateway.

    draining: the gateway is not ready any more, but requests are still served.
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
        # While Redis is lost and requests are refused for that, others may still reach it.
        refusing = self.settings.redis_lost == "refuse" and self.tenants.redis_up is False
        return not self.draining and self.catalog.ready and self.tenants.complete and not refusing
