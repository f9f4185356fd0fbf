"""HTTP connections and the ASGI shell, whatever the routes are."""
