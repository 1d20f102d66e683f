"""Kubernetes Events about canaries, for `kubectl describe` and `kubectl get events`."""

from datetime import UTC, datetime

from kubernetes import client

from baton_controller.field_manager import FIELD_MANAGER

_TIMEOUT_S = 10
_MOST_CHARS = 1024  # the API server's limit for a message


class Events:
    """Writes Events about a ConfigMap."""

    def __init__(self, api: client.ApiClient, namespace: str, config_map: str, instance: str) -> None:
        """instance: the name of this controller's pod."""
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._name = config_map
        self._instance = instance

    def write(self, reason: str, message: str, uid: str, warning: bool) -> None:
        """Write one Event. uid: of the ConfigMap. Raises ApiException."""
        now = datetime.now(UTC)
        about = client.V1ObjectReference(
            api_version="v1", kind="ConfigMap", namespace=self._namespace, name=self._name, uid=uid
        )
        event = client.CoreV1Event(
            metadata=client.V1ObjectMeta(generate_name=f"{self._name}-"),
            involved_object=about,
            reason=reason,
            message=message[:_MOST_CHARS],
            type="Warning" if warning else "Normal",
            count=1,
            first_timestamp=now,
            last_timestamp=now,
            reporting_component=FIELD_MANAGER,
            reporting_instance=self._instance,
            source=client.V1EventSource(component=FIELD_MANAGER),
        )
        self._core.create_namespaced_event(
            self._namespace, event, field_manager=FIELD_MANAGER, _request_timeout=_TIMEOUT_S
        )
