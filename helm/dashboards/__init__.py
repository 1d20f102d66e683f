"""Grafana dashboards of Baton. `python -m helm.dashboards` writes them to where the chart takes them from."""
