"""Prometheus metrics of the controller."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class Metrics:
    """All metrics of the controller, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "baton_controller_"
        self.last_reconciled = Gauge(
            prefix + "last_look_timestamp_seconds", "Unix time of the last reconciliation.", registry=registry
        )
        self.gateways = Gauge(
            prefix + "gateways", "Gateways that answered at the last reconciliation.", registry=registry
        )
        self.canary_weight = Gauge(
            prefix + "canary_weight", "Percent of a model's requests sent to its canary.", ["model"], registry=registry
        )
        self.rollbacks = Counter(prefix + "canary_rollbacks", "Canaries rolled back.", ["model"], registry=registry)
        self.desired_replicas = Gauge(
            prefix + "desired_replicas", "Pods that the load requires.", ["model", "role"], registry=registry
        )
        self.replicas = Gauge(
            prefix + "replicas", "Replicas that the Deployment is set to.", ["model", "role"], registry=registry
        )
