"""The connection to the Kubernetes API."""

from pathlib import Path

from kubernetes import client, config

from baton_kube.errors import KubernetesError

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def connect() -> client.ApiClient:
    """Return a client for this pod's cluster, or outside of a cluster for KUBECONFIG's. Raises KubernetesError."""
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            config.load_kube_config()
        except (config.ConfigException, OSError) as error:
            raise KubernetesError(f"no Kubernetes API: {error}") from None
    return client.ApiClient()


def own_namespace() -> str:
    """Return the namespace that this pod runs in, `default` outside of a cluster."""
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError:
        return "default"
