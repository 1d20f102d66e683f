"""What can be wrong with the way to a cluster."""


class KubernetesError(RuntimeError):
    """There is no cluster to talk to."""
