"""Errors of the connection to a cluster."""


class KubernetesError(RuntimeError):
    """No Kubernetes cluster is configured."""
