"""One request's state, and the outputs that its reader gets for the engine's rows. Pure."""
