"""Figures of the library: what is counted, and what Prometheus and OpenTelemetry see of it."""
