"""The controller's ConfigMap: the weights that gateways follow, and the state of the analysis, kept over restarts."""

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from kubernetes import client
from kubernetes.client import ApiException

from baton_controller.analysis import CanaryState
from baton_controller.field_manager import FIELD_MANAGER
from baton_kube.canary_maps import (
    ANALYSIS_KEY,
    OVERRIDE_KEY,
    STATUS_KEY,
    CanaryMapError,
    ControllerWeight,
    override_map,
    parse_override,
    status_map,
)

log = logging.getLogger(__name__)

_TIMEOUT_S = 10
_NOT_FOUND = 404


@dataclass
class Canaries:
    """states: the canaries that the controller judges, by model. overrides: weights set by operators, by model."""

    states: dict[str, CanaryState]
    overrides: dict[str, int]


class CanaryMap:
    """Reads and writes the ConfigMap. A write fails when another process has written since the last read."""

    def __init__(self, api: client.ApiClient, namespace: str, prefix: str, owner: str = "") -> None:
        """prefix: of the ConfigMaps' names. owner: the Deployment that owns this ConfigMap; empty = none."""
        self._core = client.CoreV1Api(api)
        self._apps = client.AppsV1Api(api)
        self._namespace = namespace
        self._name = status_map(prefix)
        self._override_name = override_map(prefix)
        self._owner = owner
        self._version: str | None = None
        self._overrides: dict[str, int] = {}
        self.uid = ""

    def read(self) -> Canaries:
        """Return the data of the ConfigMaps; a missing one counts as empty. Raises ApiException."""
        found = self._found(self._name)
        self._note(found)
        data = (found.data if found else None) or {}
        try:
            override = self._found(self._override_name)
            self._overrides = parse_override(((override.data if override else None) or {}).get(OVERRIDE_KEY, ""))
        except CanaryMapError as error:
            log.error("invalid overrides, the old ones are kept: %s", error, extra={"event": "canary_override_refused"})
        return Canaries(_decoded(data, ANALYSIS_KEY, dict[str, CanaryState]), dict(self._overrides))

    def write(self, canaries: Canaries) -> None:
        """Write the states. Raises ApiException, with status 409 when the ConfigMap has changed since `read`."""
        weights = {model: ControllerWeight(state.generation, state.weight) for model, state in canaries.states.items()}
        data = {
            STATUS_KEY: msgspec.json.encode(weights).decode(),
            ANALYSIS_KEY: msgspec.json.encode(canaries.states).decode(),
        }
        how: dict[str, Any] = {"field_manager": FIELD_MANAGER, "_request_timeout": _TIMEOUT_S}
        if self._version is None:
            body = client.V1ConfigMap(metadata=self._metadata(), data=data)
            self._note(self._core.create_namespaced_config_map(self._namespace, body, **how))
        else:
            changed = {"metadata": {"resourceVersion": self._version}, "data": data}
            self._note(self._core.patch_namespaced_config_map(self._name, self._namespace, changed, **how))

    def _metadata(self) -> client.V1ObjectMeta:
        owners = None
        if self._owner:
            owner = self._apps.read_namespaced_deployment(self._owner, self._namespace, _request_timeout=_TIMEOUT_S)
            uid = (owner.metadata.uid if owner.metadata else None) or ""
            owners = [client.V1OwnerReference(api_version="apps/v1", kind="Deployment", name=self._owner, uid=uid)]
        return client.V1ObjectMeta(name=self._name, owner_references=owners)

    def _note(self, found: client.V1ConfigMap | None) -> None:
        metadata = found.metadata if found else None
        self._version, self.uid = (metadata.resource_version, metadata.uid or "") if metadata else (None, "")

    def _found(self, name: str) -> client.V1ConfigMap | None:
        try:
            return self._core.read_namespaced_config_map(name, self._namespace, _request_timeout=_TIMEOUT_S)
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise
            return None


def _decoded(data: dict[str, str], key: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data.get(key) or "{}", type=kind)
    except msgspec.MsgspecError as error:
        log.error("%s of the ConfigMap is invalid and ignored: %s", key, error, extra={"event": "canary_state_lost"})
        return {}
