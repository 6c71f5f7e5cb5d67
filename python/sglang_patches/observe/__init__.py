"""Watching a running server from its ``/metrics``: `top` in a terminal and a Grafana dashboard."""
