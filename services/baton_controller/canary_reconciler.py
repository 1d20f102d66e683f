"""Carries out the analysis' decision about each canary: writes weights for gateways, Events and log lines."""

import logging
from collections.abc import Mapping

from kubernetes.client import ApiException

from baton_controller.analysis import Decision, decide, set_by_hand
from baton_controller.canary_map import Canaries, CanaryMap
from baton_controller.config_file import CanarySpec, ConfigFile
from baton_controller.counters import Reading, Readings, arrived
from baton_controller.events import Events
from baton_controller.metrics import Metrics
from baton_controller.report import Report

log = logging.getLogger(__name__)

_TRIES = 5
_CONFLICT = 409


class CanaryReconciler:
    """Brings the weights of all models' canaries in line with the analysis."""

    def __init__(self, canary_map: CanaryMap, events: Events, metrics: Metrics) -> None:
        self._map = canary_map
        self._events = events
        self._metrics = metrics
        self._readings: dict[str, Readings] = {}  # by model, at the last decision that was written
        self.weights: dict[str, int] = {}  # of each model's canary, in percent, after the last `reconcile`

    def reconcile(self, config: ConfigFile, reports: Mapping[str, Report], now: float) -> None:
        """Decide on each canary, and write the states that have changed. now: Unix time.

        Requests that end while no controller runs, or whose gateway does not answer, are not counted. Raises the
        exceptions of the Kubernetes client; after one, the next call still counts the requests in `reports`.
        """
        specs = {name: model.canary for name, model in config.models.items() if model.canary is not None}
        readings: dict[str, Readings] = {
            model: {name: report.readings.get(model, Reading()) for name, report in reports.items()} for model in specs
        }
        for tries_left in reversed(range(_TRIES)):
            before = self._map.read()
            after, decisions = _decide(before, specs, self._readings, readings, now)
            try:
                if after.states != before.states:
                    self._map.write(after)
                break
            except ApiException as error:
                if error.status != _CONFLICT or not tries_left:
                    raise
        self._readings = readings
        self._update_metrics(after)
        for model, decision in decisions.items():
            self._announce(model, decision)

    def _update_metrics(self, canaries: Canaries) -> None:
        for model in self.weights.keys() - canaries.states.keys():
            self._metrics.canary_weight.remove(model)
        self.weights = {model: state.weight for model, state in canaries.states.items()}
        for model, weight in self.weights.items():
            self._metrics.canary_weight.labels(model).set(weight)

    def _announce(self, model: str, decision: Decision) -> None:
        if decision.reason is None:
            return
        worse = decision.reason == "CanaryRolledBack"
        if worse:
            self._metrics.rollbacks.labels(model).inc()
        level = logging.WARNING if worse else logging.INFO
        extra = {"event": decision.reason, "model": model, "weight": decision.state.weight}
        log.log(level, "canary of %s: %s", model, decision.why, extra=extra)
        self._events.write(decision.reason, f"{model}: {decision.why}", self._map.uid, warning=worse)


def _decide(
    before: Canaries,
    specs: Mapping[str, CanarySpec],
    earlier: Mapping[str, Readings],
    readings: Mapping[str, Readings],
    now: float,
) -> tuple[Canaries, dict[str, Decision]]:
    after = Canaries({}, before.overrides)
    decisions = {}
    for model, spec in specs.items():
        canary, stable = (
            arrived(earlier.get(model, {}), readings[model], name) for name in (spec.revision, spec.stable)
        )
        state, override = before.states.get(model), before.overrides.get(model)
        if state is None or not state.judged_by(spec) or override is None:
            decisions[model] = decide(state, spec, now, canary, stable)
        else:
            if override != state.weight:
                state = set_by_hand(state, spec, override, now)
                extra = {"event": "canary_set_by_hand", "model": model}
                log.info("canary of %s: %s", model, state.verdict, extra=extra)
            decisions[model] = Decision(state)
        after.states[model] = decisions[model].state
    return after, decisions
