"""Servers that tests share. Each is started once a run, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

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
        "--dtype",
        "bfloat16",
        "--num-gpu-blocks-override",
        str(NUM_BLOCKS),
    )
    server.wait_until_ready()
    yield server
    server.stop()


def start_fake_server(purpose: str, *, drain_timeout_s: float = 30.0, step_s: float = 0.02) -> Server:
    """A server over a fake engine process: ready at once, a token each `step_s`."""
    engine = EngineConfig(
        fake=FakeEngineConfig(
            model_dir=str(MODEL_DIR), logits_width=LOGITS_WIDTH, step_s=step_s, max_model_len=100_000
        ),
        num_gpu_blocks_override=4000,
    )
    server = Server.from_configs(purpose, engine, ServerConfig(port=0, drain_timeout_s=drain_timeout_s))
    server.wait_until_ready()
    return server
