"""What the services have to do with the Kubernetes API."""
