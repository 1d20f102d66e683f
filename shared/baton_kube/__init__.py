"""What gateways and the controller share of their use of the Kubernetes API."""
