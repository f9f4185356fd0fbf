"""AsyncLLM over the in-memory engine with a FakeExecutor, for tests of the front end."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.frontend.tiny_tokenizers import byte_level_json
from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.executor.fake import load_fake
from trio_llm.frontend.async_llm import AsyncLLM, open_llm_over
from trio_llm.frontend.statistics.stats import StatLogger
from trio_llm.testing.in_memory import InMemoryCoreClient

__all__ = ["LOGITS_WIDTH", "FakeSetUp", "fake_model_dir", "open_fake_llm"]


LOGITS_WIDTH = Tokenizer.from_buffer(byte_level_json()).get_vocab_size()


@functools.cache
def fake_model_dir() -> str:
    """A directory with a tokenizer of all bytes and a small chat template, and no weights."""
    folder = Path(tempfile.mkdtemp(prefix="trio_llm-fake-model-"))
    (folder / "tokenizer.json").write_bytes(byte_level_json())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    )
    return str(folder)


class FakeSetUp:
    """The AsyncLLM and what is behind it."""

    def __init__(self, llm: AsyncLLM, core: InMemoryCoreClient) -> None:
        self.llm = llm
        self.core = core

    async def assert_nothing_is_left(self) -> None:
        """Every map of the front end is empty, the engine is idle, and all its blocks are free."""
        await self.llm.wait_idle()
        counts = await self.llm.check_scheduler()
        assert counts["num_running"] == counts["num_waiting"] == 0
        assert counts["num_free_blocks"] == counts["num_blocks"]
        assert self.llm._handler.num_unfinished == 0
        assert self.llm._handler.processor is not None
        assert len(self.llm._handler.processor) == 0
        assert not self.llm._utilities._waiting


@asynccontextmanager
async def open_fake_llm(
    *,
    step_s: float = 0.0,
    stat_loggers: Sequence[StatLogger] = (),
    num_blocks: int = 64,
    wait_until_ready: bool = True,
    **fake: Any,
) -> AsyncIterator[FakeSetUp]:
    """`fake`: fields of FakeEngineConfig."""
    config = EngineConfig(
        num_gpu_blocks_override=num_blocks,
        fake=FakeEngineConfig(model_dir=fake_model_dir(), logits_width=LOGITS_WIDTH, **fake),
    )
    core = InMemoryCoreClient(load_fake(config, lambda *_: None, model_dir=fake_model_dir()), config, step_s=step_s)
    async with open_llm_over(core, config, stat_loggers=stat_loggers, wait_until_ready=wait_until_ready) as llm:
        yield FakeSetUp(llm, core)
