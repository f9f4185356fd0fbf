"""The HTTP server: Hypercorn host, ASGI shell, routes."""
