"""Grafana dashboards of Baton. `python -m helm.dashboards` writes them into the chart, which installs them."""
