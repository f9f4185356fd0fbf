"""The engine process: one loop on torch, no Trio."""
