"""Access to the Kubernetes API, shared by gateways and the controller."""
