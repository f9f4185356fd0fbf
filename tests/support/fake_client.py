"""FakeClient: an EngineClient whose answers are scripts, and which remembers who came and who left.

Used by the tests of the HTTP server. It has the contract of the real one as far as routes can see it.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Any

import trio

from trio_llm.config import EngineConfig
from trio_llm.errors import EngineDeadError, EngineUnavailableError, InvalidRequestError
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.rendering.chat_template import ChatTemplate
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.balancing import ANYWHERE, Routing
from trio_llm.frontend.requests.sessions import StreamingInput
from trio_llm.frontend.text.detokenizer import TokenTable
from trio_llm.outputs import CompletionOutput, FinishReason, Logprob, PoolingOutput, RequestOutput, TokenLogprobs
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.tokenization import PLAIN, TokenizationParams
from trio_llm.wire.messages import ModelConfig


@dataclass(frozen=True)
class Held:
    """A token whose text is held back."""

    token: str


@dataclass(frozen=True)
class End:
    """The last output."""

    text: str = ""
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Pause:
    """Nothing for so long. For tests with a mock clock."""

    seconds: float


@dataclass(frozen=True)
class Of:
    """Something of one choice of several. Other steps are of choice 0."""

    index: int
    step: str | Held | End


class Together(tuple[Of, ...]):
    """Steps of several choices in one output, as when the reader was away."""

    def __new__(cls, *steps: Of) -> Together:
        return super().__new__(cls, steps)


HANG = "hang"
Step = str | Held | End | Of | Together | Pause | Exception | trio.Event
"""Text of one token; an error to raise; an event to wait for; HANG waits for an abort. With n > 1 each choice needs an
end."""

MODEL_CONFIG = ModelConfig(
    model_dir="/models/tiny",
    max_model_len=4096,
    logits_width=256,
    num_blocks=64,
    block_size=32,
    dtype="float32",
    device="cpu",
    eos_token_ids=(2,),
    tasks=("generate", "embed", "score"),
    versions={},
)


CHAT_TEMPLATE = ChatTemplate(
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


NUM_IDS = 4096
"""Ids of the fake tokenizer: one per byte, then one per text of a script, as they come."""


class FakeRenderer:
    """One token per character. Conversations go through a real template, with the real rules for messages."""

    def __init__(self, client: FakeClient) -> None:
        bytes_by_id = [chr(token_id).encode() for token_id in range(256)]
        bytes_by_id += [text.encode() for text in client.vocabulary()]
        bytes_by_id += [b""] * (NUM_IDS - len(bytes_by_id))
        self.token_table = TokenTable(
            logits_width=NUM_IDS,
            bytes_by_id=bytes_by_id,
            special_ids=frozenset({1}),
            scheme="bytes",
            decode=lambda token_ids, skips: "",
        )

    async def render_prompt(
        self, prompt: str | list[int], tokenization: TokenizationParams = PLAIN, *, room: int = 0
    ) -> list[int]:
        await trio.lowlevel.checkpoint()
        ids = prompt
        if isinstance(ids, str):
            ids = [ord(character) % 256 for character in ids]
            ids = ids if tokenization.add_special_tokens is False else [1, *ids]
        return tokenization.truncate(ids, max_model_len=MODEL_CONFIG.max_model_len, room=room)

    async def render_prompts(
        self, prompts: Sequence[str | list[int]], tokenization: TokenizationParams = PLAIN, *, room: int = 0
    ) -> list[list[int]]:
        return [await self.render_prompt(prompt, tokenization, room=room) for prompt in prompts]

    async def render_text(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        await trio.lowlevel.checkpoint()
        return "".join(map(self.token_text, token_ids[skip_special_tokens and token_ids[0] == 1 :]))

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == 1 else chr(token_id)

    async def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        await trio.lowlevel.checkpoint()
        return CHAT_TEMPLATE.render(messages, **options)


@dataclass
class Asked:
    """One call of `generate`."""

    request_id: str
    prompt: str | list[int]
    params: SamplingParams
    cache_salt: str | None = None
    priority: int = 0
    routing: Routing = ANYWHERE
    left: trio.Event = field(default_factory=trio.Event)
    """The block of the stream was left."""
    was_finished: bool = False
    unfinished: set[int] = field(default_factory=set)
    """Choices that have not had their end."""

    def __post_init__(self) -> None:
        self.unfinished.update(range(self.params.n))


@dataclass(frozen=True)
class Pooled:
    """One call of `encode`."""

    request_id: str
    prompt: str | list[int]
    params: PoolingParams
    priority: int = 0
    routing: Routing = ANYWHERE


class FakeClient(EngineClient):
    """Every request plays `script`; `scripts` has priority and gives each request in turn its own."""

    def __init__(self, *script: Step, scripts: Sequence[Sequence[Step]] = ()) -> None:
        self.script: tuple[Step, ...] = script or ("Hello", " world", End())
        self.scripts = list(scripts)
        self.config = EngineConfig()
        self.state = EngineStatus(state="ready")
        self.died = trio.Event()
        self.model = MODEL_CONFIG
        self.health: Exception | trio.Event | None = None
        self.admission_error: Exception | None = None
        self.num_prompt_tokens = 5
        self.num_cached_tokens = 3
        self.asked: list[Asked] = []
        self.entered = trio.Event()
        """A stream has been entered."""
        self.running: list[_FakeStream] = []
        self.pooled: list[Pooled] = []
        self.vectors: dict[int, list[float] | Exception | trio.Event] = {}
        """By the first token of a prompt: what is pooled of it, or goes wrong, or is waited for. Else its length."""
        self.num_pooling = 0
        """Now."""
        self._ids: dict[str, int] = {}
        self.vocabulary()
        self._idle = trio.Condition()

    @property
    def model_config(self) -> ModelConfig:
        self._check_loaded()
        return self.model

    @property
    def renderer(self) -> Renderer:
        self._check_loaded()
        fake: Any = FakeRenderer(self)
        renderer: Renderer = fake
        return renderer

    def vocabulary(self) -> dict[str, int]:
        """The token ids of all texts of the scripts."""
        steps = chain(self.script, *self.scripts)
        for step in chain.from_iterable(step if isinstance(step, Together) else (step,) for step in steps):
            inner = step.step if isinstance(step, Of) else step
            text = inner.text if isinstance(inner, End) else inner.token if isinstance(inner, Held) else inner
            if isinstance(text, str):
                self._ids.setdefault(text, 256 + len(self._ids))
        return self._ids

    def _check_loaded(self) -> None:
        if self.state.state == "loading":
            raise EngineUnavailableError("the engine is loading", retry_after_s=3)

    def generate(
        self,
        prompt: str | list[int] | AsyncIterable[StreamingInput],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tokenization: TokenizationParams | None = None,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> _FakeStream:
        assert isinstance(prompt, str | list), "no route opens a session"
        script = self.scripts.pop(0) if self.scripts else self.script
        asked = Asked(
            request_id or "made-up",
            prompt,
            params or SamplingParams(),
            cache_salt,
            priority,
            Routing(data_parallel_rank=data_parallel_rank, session_id=session_id),
        )
        return _FakeStream(self, asked, script)

    async def encode(
        self,
        prompt: str | list[int],
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        tokenization: TokenizationParams | None = None,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> PoolingOutput:
        await trio.lowlevel.checkpoint()
        self.check_admission()
        assert isinstance(prompt, list), "routes render"
        if not prompt:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        routing = Routing(data_parallel_rank=data_parallel_rank, session_id=session_id)
        self.pooled.append(Pooled(request_id or "made-up", prompt, params or PoolingParams(), priority, routing))
        self.num_pooling += 1
        try:
            vector = self.vectors.get(prompt[0], [float(len(prompt)), 1.0])
            if isinstance(vector, trio.Event):
                await vector.wait()
                vector = [0.0, 1.0]
            if isinstance(vector, Exception):
                raise vector
        finally:
            self.num_pooling -= 1
        data = struct.pack(f"<{len(vector)}f", *vector)
        return PoolingOutput(request_id or "made-up", len(prompt), self.num_cached_tokens, data)

    def abort(self, request_ids: str | Iterable[str]) -> int:
        ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        streams = [stream for stream in self.running if stream.asked.request_id in ids]
        for stream in streams:
            stream.aborted.set()
        return len(streams)

    def check_admission(self) -> None:
        if self.state.state == "dead":
            raise EngineDeadError(self.state.reason or "dead")
        if self.state.state != "ready":
            raise EngineUnavailableError(f"the engine is {self.state.state}", retry_after_s=3)

    @property
    def status(self) -> EngineStatus:
        return self.state

    def drain(self) -> None:
        self.state = EngineStatus(state="draining")

    async def wait_idle(self) -> None:
        async with self._idle:
            while self.running:
                await self._idle.wait()

    async def left(self, stream: _FakeStream) -> None:
        self.running.remove(stream)
        with trio.CancelScope(shield=True):
            async with self._idle:
                self._idle.notify_all()

    async def check_health(self) -> None:
        if isinstance(self.health, Exception):
            raise self.health
        if isinstance(self.health, trio.Event):
            await self.health.wait()
        await trio.lowlevel.checkpoint()

    @property
    def is_running(self) -> bool:
        return self.state.state == "ready"

    @property
    def dead_error(self) -> EngineDeadError | None:
        return EngineDeadError("dead") if self.state.state == "dead" else None

    async def wait_dead(self) -> EngineDeadError:
        await self.died.wait()
        return EngineDeadError("dead")

    @property
    def should_keep_api_server_alive(self) -> bool:
        return False

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.model_config.tasks

    def do_log_stats(self) -> None:
        raise NotImplementedError


class _FakeStream:
    def __init__(self, client: FakeClient, asked: Asked, script: Sequence[Step]) -> None:
        self.client = client
        self.asked = asked
        self.script = list(script)
        self.aborted = trio.Event()
        self.pause_ends: float | None = None

    @property
    def request_id(self) -> str:
        return self.asked.request_id

    async def __aenter__(self) -> _FakeStream:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.client.check_admission()
        if self.client.admission_error is not None:
            raise self.client.admission_error
        if not self.asked.prompt:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        self.client.asked.append(self.asked)
        self.client.running.append(self)
        self.client.entered.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.asked.left.set()
        await self.client.left(self)

    def __aiter__(self) -> _FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.asked.was_finished:
            raise StopAsyncIteration
        if self.asked.params.output_kind is RequestOutputKind.DELTA:
            return await self._next_delta()
        whole = await self._next_delta()
        while not whole.finished:
            _append(whole, await self._next_delta())
        return whole

    async def _next_delta(self) -> RequestOutput:
        has_waited = False
        while True:
            if self.aborted.is_set():
                return self._output("", [], End(finish_reason="abort"), min(self.asked.unfinished))
            if not self.script:
                raise StopAsyncIteration
            step = self.script[0]
            if isinstance(step, trio.Event):
                await step.wait()
                self.script.pop(0)
                has_waited = True
            elif isinstance(step, Pause):
                if self.pause_ends is None:
                    self.pause_ends = trio.current_time() + step.seconds
                await trio.sleep_until(self.pause_ends)  # cancelled and called again, it ends at the same time
                self.script.pop(0)
                self.pause_ends = None
            elif step == HANG:
                await self.aborted.wait()
            else:
                break
        if not has_waited:
            await trio.lowlevel.checkpoint()
        self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return self._merged(step if isinstance(step, Together) else (step,))

    def _merged(self, steps: Sequence[Step]) -> RequestOutput:
        """One output of all these steps."""
        outputs = []
        for step in steps:
            index, one = (step.index, step.step) if isinstance(step, Of) else (0, step)
            assert isinstance(one, str | Held | End)
            outputs.append(self._output_of(index, one))
        first, *others = outputs
        for other in others:
            first.outputs += other.outputs
            first.finished = other.finished
        return first

    def _output_of(self, index: int, step: str | Held | End) -> RequestOutput:
        if isinstance(step, End):
            return self._output(step.text, [step.text] if step.text else [], step, index)
        if isinstance(step, Held):
            return self._output("", [step.token], None, index)
        return self._output(step, [step], None, index)

    def _output(self, text: str, tokens: list[str], end: End | None, index: int) -> RequestOutput:
        wanted, ids = self.asked.params.logprobs, self.client.vocabulary()
        completion = CompletionOutput(
            index=index,
            text=text,
            token_ids=[ids[token] for token in tokens],
            logprobs=None if wanted is None else [_logprobs(token, ids[token], wanted) for token in tokens],
            finish_reason=end.finish_reason if end else None,
            stop_reason=end.stop_reason if end else None,
        )
        if end is not None:
            self.asked.unfinished.remove(index)
            self.asked.was_finished = not self.asked.unfinished
        return RequestOutput(
            request_id=self.asked.request_id,
            num_prompt_tokens=self.client.num_prompt_tokens,
            num_cached_tokens=self.client.num_cached_tokens,
            outputs=[completion],
            finished=self.asked.was_finished,
        )


def _append(whole: RequestOutput, more: RequestOutput) -> None:
    whole.finished = more.finished
    (new,) = more.outputs
    known = [choice for choice in whole.outputs if choice.index == new.index]
    if not known:
        whole.outputs = sorted([*whole.outputs, new], key=lambda choice: choice.index)
        return
    (one,) = known
    one.text += new.text
    one.token_ids += new.token_ids
    if new.logprobs is not None:
        one.logprobs = [*(one.logprobs or []), *new.logprobs]
    one.finish_reason, one.stop_reason = new.finish_reason, new.stop_reason


def _logprobs(token: str, token_id: int, top: int) -> TokenLogprobs:
    sampled = Logprob(token_id=token_id, logprob=-0.5, rank=1, token=token, token_bytes=token.encode())
    others = tuple(
        Logprob(token_id=100 + i, logprob=-1.0 - i, rank=2 + i, token=f"t{i}", token_bytes=b"t%d" % i)
        for i in range(top - 1)
    )
    return TokenLogprobs(sampled=sampled, top=(sampled, *others) if top else ())
