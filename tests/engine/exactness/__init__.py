"""What must not depend on how the engine goes about it."""
