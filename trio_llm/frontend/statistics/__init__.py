"""Counting what happens, for logs and Prometheus."""
