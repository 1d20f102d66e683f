"""Sets the replicas of Deployments to the number that the load requires, or only publishes that number."""

import logging
from collections.abc import Mapping

from kubernetes import client

from baton_controller.config_file import ConfigFile, ModelSpec, RoleSpec, ScalerSpec
from baton_controller.counters import Reading, extended, total, window
from baton_controller.field_manager import FIELD_MANAGER
from baton_controller.load import Load, load_of
from baton_controller.metrics import Metrics
from baton_controller.report import Report
from baton_controller.scaling import Scaling, Size

log = logging.getLogger(__name__)

_TIMEOUT_S = 10


class Scaler:
    """Scales the prefill and decode Deployments of all models."""

    def __init__(self, api: client.ApiClient, namespace: str, metrics: Metrics) -> None:
        self._apps = client.AppsV1Api(api)
        self._namespace = namespace
        self._metrics = metrics
        self._policies: dict[str, Scaling] = {}
        self._readings: dict[str, dict[str, Reading]] = {}
        self._explained: dict[tuple[str, str], int] = {}

    def reconcile(
        self, config: ConfigFile, reports: Mapping[str, Report], now: float, canaries: Mapping[str, int]
    ) -> None:
        """Scale each model that has a scaler. now: monotonic seconds. canaries: weights by model, in percent.

        An exception of the Kubernetes client is raised only after all models have been scaled.
        """
        failed: Exception | None = None
        for model, spec in config.models.items():
            if spec.scaler is not None and reports:
                try:
                    # If the canary is rolled back, stable's pods must take its requests, so they may not shrink.
                    hold = 0 < canaries.get(model, 0) < 100
                    self._size(model, spec, spec.scaler, reports, now, hold)
                except Exception as error:  # go on, so that the other models are still scaled
                    failed = error
        for model in self._policies.keys() - {name for name, spec in config.models.items() if spec.scaler}:
            del self._policies[model]
            del self._readings[model]
            for role in ("prefill", "decode"):
                self._metrics.replicas.remove(model, role)
                self._metrics.desired_replicas.remove(model, role)
        if failed is not None:
            raise failed

    def _size(
        self, model: str, spec: ModelSpec, scaler: ScalerSpec, reports: Mapping[str, Report], now: float, hold: bool
    ) -> None:
        load = self._load(model, spec, reports, now)
        replicas = {name: self._replicas(role) for name, role in _roles(scaler)}
        # As with a HorizontalPodAutoscaler, 0 replicas turn scaling off.
        if not all(replicas.values()):
            return
        policy = self._policies.setdefault(model, Scaling())
        sizes = policy.decide(load, replicas["prefill"], replicas["decode"], scaler, hold)
        for name, role in _roles(scaler):
            size = sizes.prefill if name == "prefill" else sizes.decode
            self._metrics.replicas.labels(model, name).set(replicas[name])
            self._metrics.desired_replicas.labels(model, name).set(size.replicas)
            self._explain(model, name, replicas[name], size, scaler)
            if size.replicas != replicas[name] and scaler.mode == "scale" and not scaler.dry_run:
                self._scale(role, size.replicas)

    def _load(self, model: str, spec: ModelSpec, reports: Mapping[str, Report], now: float) -> Load:
        revision = spec.canary.stable if spec.canary else None
        readings = {name: report.readings.get(model, Reading()) for name, report in reports.items()}
        start = extended(self._readings.get(model, {}), readings)
        self._readings[model] = readings
        names = (
            {name for reading in readings.values() for name in reading.revisions} if revision is None else {revision}
        )
        served = total(window(start, readings, name) for name in names)
        return load_of(model, revision, reports, served, now)

    def _explain(self, model: str, role: str, replicas: int, size: Size, scaler: ScalerSpec) -> None:
        """Log a decision only once, even if the Deployment takes many reconciliations to follow it."""
        key = (model, role)
        if size.replicas == replicas:
            self._explained.pop(key, None)
        elif self._explained.get(key) != size.replicas:
            self._explained[key] = size.replicas
            how = " (dry run)" if scaler.dry_run else " (published only)" if scaler.mode == "metrics" else ""
            extra = {"event": "scaled", "model": model, "role": role, "replicas": size.replicas}
            log.info("%s of %s: %d → %d%s: %s", role, model, replicas, size.replicas, how, size.why, extra=extra)

    def _replicas(self, role: RoleSpec) -> int:
        scale = self._apps.read_namespaced_deployment_scale(
            role.deployment, self._namespace, _request_timeout=_TIMEOUT_S
        )
        return (scale.spec.replicas if scale.spec else 0) or 0

    def _scale(self, role: RoleSpec, replicas: int) -> None:
        body = {"spec": {"replicas": replicas}}
        self._apps.patch_namespaced_deployment_scale(
            role.deployment, self._namespace, body, field_manager=FIELD_MANAGER, _request_timeout=_TIMEOUT_S
        )


def _roles(scaler: ScalerSpec) -> tuple[tuple[str, RoleSpec], tuple[str, RoleSpec]]:
    return ("prefill", scaler.prefill), ("decode", scaler.decode)
