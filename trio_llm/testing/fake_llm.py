"""FakeLLM: AsyncLLM itself over the real scheduler and a fake device. A test sets its answers and faults.

It needs no process, socket, thread or file of a model: everything runs in the test's own Trio loop, so a MockClock
works, and with autojump hours of fake engine time pass at once.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from trio_llm.config import EngineConfig, FakeEngineConfig
from trio_llm.engine.executor.fake import DEFAULT_NUM_BLOCKS
from trio_llm.engine.scheduling.step import RowError, SampledToken
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.frontend.core_client.restart_policy import RestartPolicy
from trio_llm.frontend.core_client.restarting import RestartingClient
from trio_llm.frontend.open_llm import open_tasks
from trio_llm.frontend.rendering.chat_template import ChatTemplate
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.rendering.tokenizer import Tokenizer, read_tokenizer_config
from trio_llm.frontend.statistics.stats import StatLoggerSource
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import SamplingParams
from trio_llm.testing.answers import END, LOGITS_WIDTH, MODEL_DIR, AnsweringExecutor, read_text
from trio_llm.testing.in_memory import InMemoryCoreClient
from trio_llm.wire.messages import Abort, EngineCoreRequest, ModelConfig, ToEngine

__all__ = ["FakeLLM", "FakeRequest", "open_fake_llm"]

_T = TypeVar("_T")

_FAKE_FIELDS: Final = frozenset(FakeEngineConfig.__struct_fields__) - (
    {"model_dir", "logits_width", "step_s", "start_s"} | {"max_model_len"}
)
"""The fields that a test may set. `max_model_len` is a field of EngineConfig, too."""


@dataclass(slots=True, kw_only=True)
class FakeRequest:
    """One request that was sent to the fake engine. Each choice of an answer is a request."""

    request_id: str
    """The caller's id."""
    prompt: str
    """The prompt as text. A conversation is shown as its chat template: `<|user|>Hello<|assistant|>`."""
    token_ids: list[int]
    """The prompt's ids. An id below 256 is a byte."""
    params: SamplingParams
    """The parameters with their defaults."""
    pooling: PoolingParams | None = None
    """Set for a request of a vector. Then `params` has no meaning."""
    rank: int = 0
    """Of the engine that got it; of the newest one, if it was sent again."""
    was_aborted: bool = False
    """The front end has aborted it: the reader left, or a stop string was found."""


class FakeLLM(AsyncLLM):
    """An engine that a test controls. Made by `open_fake_llm()` only; everything else is as with `open_llm()`."""

    def __init__(
        self,
        executors: Sequence[AnsweringExecutor],
        config: EngineConfig,
        stat_loggers: Sequence[StatLoggerSource],
        *,
        step_s: float,
    ) -> None:
        self._executors = executors
        """By the engine's index."""
        self._engine_config = config
        self._step_s = step_s
        self._fake_cores: dict[int, InMemoryCoreClient] = {}
        """The link to the newest incarnation of each engine, by its index."""
        self._requests: dict[str, FakeRequest] = {}
        """By internal id, in order."""
        cores: list[CoreClient] = []
        for index in range(len(executors)):
            make = partial(self._make_core, index)
            restarts = config.on_engine_death == "restart"
            cores.append(
                RestartingClient(make, RestartPolicy(config.max_engine_restarts)) if restarts else make(epoch=1)
            )
        super().__init__(cores, config, stat_loggers, keep_alive_on_engine_death=False)

    # --------------------------------------------------------------------------------------- answers

    @property
    def answers(self) -> Mapping[str, str]:
        """Texts by prompt, or by the last message of a conversation. May be set at any time, for later requests.

        The prompt of a session's later input is all the text before its answer, earlier answers included.
        """
        return self._executor.answers

    @answers.setter
    def answers(self, answers: Mapping[str, str]) -> None:
        for executor in self._executors:
            executor.answers = answers

    @property
    def answer(self) -> str | None:
        """The text for all other prompts. None: letters without end, which follow from the prompt and the seed."""
        return self._executor.answer

    @answer.setter
    def answer(self, answer: str | None) -> None:
        for executor in self._executors:
            executor.answer = answer

    # ---------------------------------------------------------------------------------------- faults

    def kill(self, reason: str = "killed by the test", *, engine: int = 0, for_good: bool = False) -> None:
        """End an engine, as a crash does. Readers get what was sent, then EngineDeadError with `reason`. With
        `on_engine_death="restart"` another incarnation starts half a second later, and readers get the rest; with
        several engines another engine goes on with them at once.

        Args:
            engine: its index.
            for_good: no other incarnation follows.
        """
        self._engines[engine].core.kill(reason, for_good=for_good)

    def stall(self, *, engine: int = 0) -> None:
        """Let an engine hang: it reads nothing and finishes no step until `resume`. It is killed when it has hung for
        `stall_timeout_s`."""
        self._fake_cores[engine].pause()

    def resume(self, *, engine: int = 0) -> None:
        """End `stall`; nothing was lost."""
        self._fake_cores[engine].resume()

    def slow(self, step_s: float) -> None:
        """Let each step of all engines, from the next one on, take `step_s` seconds of Trio's clock."""
        self._step_s = step_s
        for core in self._fake_cores.values():
            core.step_s = step_s

    def drop_next_frame(self, *, engine: int = 0) -> None:
        """Lose the next message of an engine that has tokens.

        The front end notices that at the next message, a second later if no request causes one, and ends the engine as
        `kill` does.
        """
        self._fake_cores[engine].drop_next_frame()

    def faulty_token(self, *, engine: int = 0) -> None:
        """Let the next row of a step have a token that cannot be, as from broken logits. That request fails alone."""
        self._executors[engine].faults.append(SampledToken(-1))

    def fail_next_row(self, message: str = "failed by the test", *, engine: int = 0) -> None:
        """Let the next row of a step fail with this message. That request fails alone, with EngineGenerateError."""
        self._executors[engine].faults.append(RowError(message))

    # ------------------------------------------------------------------------------------ inspection

    @property
    def core(self) -> InMemoryCoreClient:
        """The link to the first engine, for messages that the test injects. A restart replaces it."""
        return self._fake_cores[0]

    @property
    def cores(self) -> list[InMemoryCoreClient]:
        """The links to all engines, in their order."""
        return [self._fake_cores[engine.index] for engine in self._engines]

    @property
    def requests(self) -> list[FakeRequest]:
        """All requests that were sent to engines, in order. A session is shown with its first input."""
        return list(self._requests.values())

    @property
    def num_running(self) -> int:
        """Sequences that the schedulers run at this moment."""
        return sum(core.core.stats.num_running for core in self.cores)

    @property
    def num_waiting(self) -> int:
        """Sequences in the schedulers' queues at this moment. Requests that no engine has read are not counted."""
        return sum(core.core.stats.num_waiting for core in self.cores)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence holds at this moment."""
        return sum(core.core.stats.num_free_blocks for core in self.cores)

    async def assert_idle(self) -> None:
        """Assert that nothing is left of any request, in the front end, in the scheduler and in the KV cache.

        Waits until the engine has confirmed all aborts. If the engine is dead, only the front end is checked.

        Cancellation: safe.

        Raises:
            AssertionError: a request is unfinished in its block, or something leaks, or the engine is stalled.
        """
        running = [request.state.external_id for request in self._registry.in_flight.values() if request.is_unfinished]
        assert not running, f"unfinished requests, whose blocks the program is still in: {running}"
        if self.dead_error is None:
            stalled = [engine for engine in self._engines if not engine.is_dead and self.cores[engine.index].is_paused]
            assert not stalled, "an engine is stalled, so nothing can be confirmed; call resume() first"
        await self.wait_idle()
        self._registry.check()
        assert len(self._registry) == 0
        assert self._registry._ledger.num_requests == self._registry._ledger.num_tokens == 0
        if self.dead_error is not None:
            return
        counts = await self.check_scheduler()
        assert counts["num_running"] == counts["num_waiting"] == 0, counts
        assert counts["num_free_blocks"] == counts["num_blocks"], counts
        assert not any(engine.utilities._waiting for engine in self._engines)

    @property
    def _executor(self) -> AnsweringExecutor:
        """The first engine's."""
        return self._executors[0]

    def _make_core(self, index: int, epoch: int) -> InMemoryCoreClient:
        config = self._engine_config
        core = InMemoryCoreClient(
            self._executors[index], config, step_s=self._step_s, epoch=epoch, engine_index=config.first_rank + index
        )
        core.on_sent = self._remember
        self._fake_cores[index] = core
        return core

    def _remember(self, message: ToEngine) -> None:
        if isinstance(message, EngineCoreRequest):
            in_flight = self._registry.in_flight[message.request_id]
            rank = self._engines[in_flight.engine_index].rank
            if known := self._requests.get(message.request_id):
                known.rank = rank
                return
            prompt = message.prompt_token_ids
            self._requests[message.request_id] = FakeRequest(
                request_id=in_flight.state.external_id,
                prompt=read_text(prompt),
                token_ids=prompt,
                params=message.params,
                pooling=message.pooling_params,
                rank=rank,
            )
        elif isinstance(message, Abort):
            for request_id in self._requests.keys() & set(message.request_ids):
                self._requests[request_id].was_aborted = True

    # ----------------------------------------------------------------------------------- for AsyncLLM

    async def _load_renderer(self, model: ModelConfig) -> Renderer:
        tokenizer, template = _tokenizer_and_template()
        return _InlineRenderer(tokenizer, template, max_model_len=model.max_model_len)


class _InlineRenderer(Renderer):
    """Renders in the calling task: while a thread works, every task waits, and a MockClock would jump."""

    async def _run(self, work: Callable[[], _T], *, size: int) -> _T:
        return await super()._run(work, size=0)


@functools.cache
def _tokenizer_and_template() -> tuple[Tokenizer, ChatTemplate]:
    return (
        Tokenizer.load(MODEL_DIR, logits_width=LOGITS_WIDTH),
        ChatTemplate.load(MODEL_DIR, read_tokenizer_config(MODEL_DIR)),
    )


@asynccontextmanager
async def open_fake_llm(
    *,
    answers: Mapping[str, str] | None = None,
    answer: str | None = None,
    step_s: float = 0.0,
    num_engines: int = 1,
    stat_loggers: Sequence[StatLoggerSource] = (),
    wait_until_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[FakeLLM]:
    """A FakeLLM while the block lasts.

    Args:
        answers: texts by prompt, or by the last message of a conversation. A token is a byte, so `Hi` takes two steps,
            and a third one for the end.
        answer: the text for all other prompts. None: letters without end, up to `max_tokens` or the context; the same
            for the same prompt with the same seed, or at temperature 0.
        step_s: seconds of Trio's clock that each step takes; 0: only a schedule point.
        num_engines: engines that share the requests; the same as `data_parallel_size`.
        stat_loggers: as `open_llm`.
        wait_until_ready: False: enter while the model seems to load.
        settings: fields of EngineConfig, such as `max_model_len`, `max_num_seqs` or `num_gpu_blocks_override`; and
            of FakeEngineConfig, such as `script` (token ids) or `fail_at_step`. The default of `on_engine_death` is
            "exit" here, so that faults show.

    Cancellation: safe; leaving the block, by any way, ends everything at once.

    Raises:
        ConfigError: a setting is out of range.
        TypeError: a setting has an unknown name.
    """
    fake_fields = {name: settings.pop(name) for name in _FAKE_FIELDS & settings.keys()}
    fake = FakeEngineConfig(logits_width=LOGITS_WIDTH, **{"eos_token_ids": (END,), **fake_fields})
    config = EngineConfig(fake=fake, **{"on_engine_death": "exit", "data_parallel_size": num_engines, **settings})
    if config.max_model_len is not None:
        fake = msgspec.structs.replace(fake, max_model_len=config.max_model_len)
    num_blocks = config.num_gpu_blocks_override or DEFAULT_NUM_BLOCKS
    executors = [AnsweringExecutor(fake, num_blocks=num_blocks) for _ in range(config.num_local_engines)]
    llm = FakeLLM(executors, config, stat_loggers, step_s=step_s)
    llm.answers = {} if answers is None else answers
    llm.answer = answer
    async with open_tasks(llm, wait_until_ready=wait_until_ready):
        yield llm
