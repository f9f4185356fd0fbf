"""Names under which the loaded model is served.

Pure. Used by the routes, and by the command line for the label of the metrics.
"""

from __future__ import annotations

from trio_llm.config import EngineConfig, ServerConfig, default_model_name

__all__ = ["model_names"]


def model_names(engine: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """The names that the operator chose, else the name of the model's directory. The first is the main one."""
    return server.served_model_names or (default_model_name(engine),)
