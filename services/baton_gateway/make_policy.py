"""From the settings to the policy."""

from baton_gateway.cost import CostModel
from baton_gateway.kv_aware import KvAware
from baton_gateway.policies import LeastLoaded, Policy, Random, RoundRobin
from baton_gateway.prefix_index import PrefixIndex
from baton_gateway.settings import GatewaySettings


def make_policy(settings: GatewaySettings, index: PrefixIndex) -> Policy:
    """Return the policy that the settings name. index: what pods have cached, kept up to date by others."""
    match settings.routing_policy:
        case "random":
            return Random()
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "kv_aware":
            costs = CostModel(transfer_rate=settings.kv_transfer_rate)
            return KvAware(index, costs, settings.stay_margin, settings.local_prefill)
