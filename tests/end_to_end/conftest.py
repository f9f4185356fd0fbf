"""Servers that tests share. Each is started once a run, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.end_to_end.servers import Server
from trio_llm.config import EngineConfig, FakeEngineConfig, ServerConfig
from trio_llm.testing.answers import LOGITS_WIDTH, MODEL_DIR

NUM_BLOCKS = 400
"""A small KV cache: 12,800 tokens, about 600 MB in float32."""


@pytest.fixture(scope="session")
def float32_server() -> Iterator[Server]:
    """The embedded model in float32, where greedy tokens do not depend on the batch."""
    server = Server.from_command_line(
        "the embedded model in float32", "--dtype", "float32", "--num-gpu-blocks-override", str(NUM_BLOCKS)
    )
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture
def fragile_server() -> Iterator[Server]:
    """The embedded model in bfloat16. For one test, which kills the engine; the server then ends by itself."""
    server = Server.from_command_line(
        "the embedded model in bfloat16, and its engine's death",
        "--on-engine-death",
        "exit",
        "--dtype",
        "bfloat16",
        "--num-gpu-blocks-override",
        str(NUM_BLOCKS),
    )
    server.wait_until_ready()
    yield server
    server.stop()


def fake_engine(*, step_s: float = 0.02, script: str = "", killer: str | None = None, **settings: Any) -> EngineConfig:
    """A fake engine that is ready at once and gives a token each `step_s`.

    Args:
        script: what every answer says, over and over; else bytes that follow from prompt and seed.
        killer: a prompt that begins with this letter ends the engine.
        settings: fields of EngineConfig.
    """
    fake = FakeEngineConfig(
        model_dir=str(MODEL_DIR),
        logits_width=LOGITS_WIDTH,
        step_s=step_s,
        max_model_len=100_000,
        script=tuple(script.encode()),
        killer_prompt=None if killer is None else ord(killer),
    )
    return EngineConfig(fake=fake, **{"num_gpu_blocks_override": 4000, **settings})


def start_fake_server(
    purpose: str, engine: EngineConfig | None = None, *, environment: Mapping[str, str] | None = None, **settings: Any
) -> Server:
    """A server over a fake engine process.

    Args:
        environment: as `Server`.
        settings: fields of ServerConfig.
    """
    config = ServerConfig(port=0, **settings)
    server = Server.from_configs(purpose, engine or fake_engine(), config, environment=environment)
    server.wait_until_ready()
    return server
