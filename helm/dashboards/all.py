"""The list of all dashboards."""

from .canary import CANARY
from .cost import COST
from .handover import HANDOVER
from .overview import OVERVIEW
from .pools import DECODE, PREFILL
from .routing import ROUTING
from .tenants import TENANTS
from .ttft import TTFT

BOARDS = (OVERVIEW, TTFT, ROUTING, HANDOVER, PREFILL, DECODE, TENANTS, CANARY, COST)
