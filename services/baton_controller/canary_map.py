"""The ConfigMap that gateways follow, and that keeps the analysis across restarts of the controller."""

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from kubernetes import client

from baton_controller.analysis import CanaryState

log = logging.getLogger(__name__)

WEIGHTS_KEY = "canary.json"
ANALYSIS_KEY = "analysis.json"
_TIMEOUT_S = 10


@dataclass
class Canaries:
    """weights: what gateways read, by model: revision, weight, shadow, and what else somebody has put there."""

    weights: dict[str, dict[str, Any]]
    states: dict[str, CanaryState]

    def copy(self) -> "Canaries":
        return Canaries({model: dict(entry) for model, entry in self.weights.items()}, dict(self.states))


class CanaryMap:
    """Reads and writes it; a write is refused when somebody else has written since the last read."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str) -> None:
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._name = name
        self._version: str | None = None
        self.uid = ""

    def read(self) -> Canaries:
        """Raises ApiException, with 404 when there is none."""
        found = self._core.read_namespaced_config_map(self._name, self._namespace, _request_timeout=_TIMEOUT_S)
        assert found.metadata is not None
        self._version, self.uid = found.metadata.resource_version, found.metadata.uid or ""
        data = found.data or {}
        return Canaries(
            _decoded(data, WEIGHTS_KEY, dict[str, dict[str, Any]]), _decoded(data, ANALYSIS_KEY, dict[str, CanaryState])
        )

    def write(self, canaries: Canaries) -> None:
        """Raises ApiException, with 409 when what was read is not the newest any more."""
        data = {
            WEIGHTS_KEY: msgspec.json.encode(canaries.weights).decode(),
            ANALYSIS_KEY: msgspec.json.encode(canaries.states).decode(),
        }
        body = {"metadata": {"resourceVersion": self._version}, "data": data}
        self._core.patch_namespaced_config_map(self._name, self._namespace, body, _request_timeout=_TIMEOUT_S)


def _decoded(data: dict[str, str], key: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data.get(key) or "{}", type=kind)
    except msgspec.MsgspecError as error:
        log.error("%s of the ConfigMap is lost: %s", key, error, extra={"event": "canary_state_lost"})
        return {}
