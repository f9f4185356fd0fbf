"""The OpenAI protocol: bodies in, events out. Pure."""
