"""HTTP connections, the ASGI shell, and what a reply is, independent of the routes."""
