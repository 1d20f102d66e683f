"""The usage and the limits of tenants."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..tenancy.quota import Quota
from ..tenancy.tenants import Tenants
from .gateway_registry import OfAnyThread
from .record import RequestRecord

_PREFIX = "baton_gateway_"


class TenantMetrics:
    """Metrics by tenant. Where requests need no key, their tenant is "default"."""

    def __init__(self, tenants: Tenants, quota: Quota, registry: CollectorRegistry) -> None:
        self._requests = Counter(_PREFIX + "tenant_requests", "Requests.", ["tenant", "status"], registry=registry)
        self._tokens = Counter(
            _PREFIX + "tenant_tokens", "Tokens used.", ["tenant", "model", "kind"], registry=registry
        )
        registry.register(_Limits(tenants))
        registry.register(_InFlight(quota))

    def finished(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        if record.identity is None:
            return
        tenant = record.identity.name
        self._requests.labels(tenant, str(record.status)).inc()
        if record.model is not None:
            self._tokens.labels(tenant, record.model, "prompt").inc(record.prompt_tokens)
            self._tokens.labels(tenant, record.model, "generation").inc(record.completion_tokens)


class _InFlight(Collector):
    def __init__(self, quota: Quota) -> None:
        self._quota = quota

    def collect(self) -> Iterable[Metric]:
        open_now = GaugeMetricFamily(
            _PREFIX + "tenant_requests_in_flight", "Requests of a tenant being answered.", labels=["tenant"]
        )
        for name, count in self._quota.in_flight().items():
            open_now.add_metric([name], count)
        yield open_now


class _Limits(OfAnyThread):
    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def collect(self) -> Iterable[Metric]:
        limits = GaugeMetricFamily(
            _PREFIX + "tenant_limit",
            "The limits of a tenant; a limit that is not set is absent.",
            labels=["tenant", "limit"],
        )
        for name, tenant in self._tenants.known.items():
            for limit in ("requests_per_minute", "tokens_per_minute", "max_streams", "budget_tokens"):
                if value := getattr(tenant, limit):
                    limits.add_metric([name, limit], value)
        yield limits
        yield GaugeMetricFamily(
            _PREFIX + "keys_age_seconds",
            "Time since tenants and keys were last read or found unchanged.",
            value=self._tenants.age_s,
        )
        if self._tenants.unusable_keys is not None:
            yield GaugeMetricFamily(
                _PREFIX + "unusable_keys",
                "Entries in Redis that cannot be used as keys.",
                value=self._tenants.unusable_keys,
            )
        if self._tenants.redis_up is not None:
            yield GaugeMetricFamily(
                _PREFIX + "redis_up", "1 while Redis can be reached.", value=float(self._tenants.redis_up)
            )
