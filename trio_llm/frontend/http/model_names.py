"""Names under which the loaded model is served.

Pure. Used by the routes, and by the command line for the label of the metrics.
"""

from __future__ import annotations

from pathlib import PurePath

from trio_llm.config import EngineConfig, ServerConfig

__all__ = ["EMBEDDED_MODEL_NAME", "model_names"]

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"


def model_names(engine: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """The names that the operator chose, else the name of the model's directory. The first is the main one."""
    if server.served_model_names:
        return server.served_model_names
    if engine.model is None:
        return (EMBEDDED_MODEL_NAME,)
    return (PurePath(engine.model).name or engine.model,)
