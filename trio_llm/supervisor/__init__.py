"""Several front-end processes over one address and the same engines: `trio-llm serve --api-server-count N`."""
