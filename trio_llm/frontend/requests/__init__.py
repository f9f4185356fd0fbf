"""From a prompt to its outputs: admission, registry, streams, sessions, recovery."""
