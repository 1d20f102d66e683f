"""Reads the addresses of pods and the weights of canaries from the Kubernetes API."""

from collections.abc import Callable

from kubernetes import client

from baton_kube.api import connect, own_namespace
from baton_kube.object_watch import Objects, ObjectWatch

from ..concurrency.background import FAILURES
from ..settings import GatewaySettings
from .canary_watches import CanaryWatches
from .catalog import Catalog, Pool

ROLE_LABEL = "baton.dev/role"
_PORT = "grpc"


class Discovery:
    """Watches EndpointSlices for every pool that has a selector, and the ConfigMaps of canaries if they are named."""

    def __init__(self, settings: GatewaySettings, catalog: Catalog) -> None:
        """Raises KubernetesError when there is no cluster."""
        api, namespace = connect(), settings.namespace or own_namespace()
        slices, maps = client.DiscoveryV1Api(api), client.CoreV1Api(api)
        failed = FAILURES.labels("kubernetes").inc
        self._watches = [
            ObjectWatch(
                f"pods of model {model}, pool {pool.spec.name}",
                slices.list_namespaced_endpoint_slice,
                _follower(pool),
                failed,
                namespace=namespace,
                label_selector=pool.spec.selector,
            )
            for model, pool in catalog.pools
            if pool.spec.selector
        ]
        if prefix := settings.canary_configmaps:
            canaries = CanaryWatches(catalog, prefix)
            self._watches += [
                ObjectWatch(
                    f"ConfigMap {name}",
                    maps.list_namespaced_config_map,
                    changed,
                    failed,
                    namespace=namespace,
                    field_selector=f"metadata.name={name}",
                )
                for name, changed in canaries.followed.items()
            ]

    def start(self) -> None:
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        for watch in self._watches:
            watch.stop()


def _follower(pool: Pool) -> Callable[[Objects], None]:
    return lambda slices: pool.fleet.follow(_addresses(slices, "decode"), _addresses(slices, "prefill"))


def _addresses(slices: Objects, role: str) -> set[str]:
    """Return the addresses of a role's pods, ready or not, since each pod reports whether it takes requests."""
    return {
        f"[{address}]:{port.port}" if ":" in address else f"{address}:{port.port}"
        for found in slices.values()
        if (found.metadata.labels or {}).get(ROLE_LABEL) == role
        for port in found.ports or ()
        if port.name == _PORT
        for endpoint in found.endpoints or ()
        for address in endpoint.addresses or ()
    }
