"""The renderer: what is refused at the door, where the work runs, and what a cancelled caller leaves behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.support import tiny_tokenizers
from tests.support.tiny_tokenizers import load_tokenizer, vocab_size
from trio_llm.errors import InvalidRequestError, PromptTooLongError
from trio_llm.frontend.rendering.chat_template import ChatTemplate
from trio_llm.frontend.rendering.renderer import INLINE_CHARS, MAX_THREADS, Renderer
from trio_llm.frontend.rendering.tokenizer import Tokenizer
from trio_llm.tokenization import PLAIN, TokenizationParams

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


class RecordingTokenizer(Tokenizer):
    """Notes in which threads it encodes; `gate`, if set, is waited for first."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content, logits_width=vocab_size(content))
        self.threads: list[threading.Thread] = []
        self.gate: threading.Event | None = None
        self._started = threading.Semaphore(0)
        self.num_done = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.append(threading.current_thread())
        self._started.release()
        if self.gate is not None:
            assert self.gate.wait(30)
        ids = super().encode(text, add_special_tokens=add_special_tokens)
        self.num_done += 1
        return ids

    async def wait_started(self, count: int) -> None:
        for _ in range(count):
            assert await trio.to_thread.run_sync(lambda: self._started.acquire(timeout=30))


def make_renderer(
    *, max_model_len: int = 100_000, template: str | None = TEMPLATE
) -> tuple[Renderer, RecordingTokenizer]:
    tokenizer = RecordingTokenizer(tiny_tokenizers.byte_level_json())
    return Renderer(tokenizer, ChatTemplate(template), max_model_len=max_model_len), tokenizer


async def chat_ids(renderer: Renderer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """The ids of a conversation, as servers and programs get them."""
    return await renderer.render_prompt(await renderer.render_chat(messages, **options), PLAIN.for_chat())


async def test_text_becomes_ids_and_ids_stay_as_they_are() -> None:
    renderer, tokenizer = make_renderer()

    assert await renderer.render_prompt("hello world") == tokenizer.encode("hello world", add_special_tokens=True)
    assert await renderer.render_prompt([5, 6]) == [5, 6]


async def test_special_tokens_are_added_to_prompts_but_not_to_chats() -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.byte_fallback_json())
    renderer = Renderer(tokenizer, ChatTemplate("{{ messages[0].content }}"), max_model_len=100)
    plain = tokenizer.encode("he", add_special_tokens=False)

    assert await renderer.render_prompt("he") == [1, *plain]
    assert await renderer.render_prompt("he", TokenizationParams(add_special_tokens=False)) == plain
    assert await chat_ids(renderer, [{"role": "user", "content": "he"}]) == plain


async def test_a_conversation_becomes_the_ids_of_its_text() -> None:
    renderer, tokenizer = make_renderer()

    token_ids = await chat_ids(renderer, [{"role": "user", "content": "hello"}])

    assert token_ids == tokenizer.encode("user: hello\nbot:", add_special_tokens=False)


async def test_small_texts_are_encoded_in_place_and_big_ones_in_a_worker_thread() -> None:
    renderer, tokenizer = make_renderer()
    small, big = "a" * INLINE_CHARS, "a" * (INLINE_CHARS + 1)

    await renderer.render_prompt(small)
    await renderer.render_prompt(big)
    await chat_ids(renderer, [{"role": "user", "content": big}])

    here = threading.current_thread()
    assert [thread is here for thread in tokenizer.threads] == [True, False, False]


@pytest.mark.parametrize(
    ("messages", "options", "in_place"),
    [
        ([{"role": "user", "content": "x"}], {}, True),
        ([{"role": "user", "content": "x" * 5000}], {}, False),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * 5000}]}], {}, False),
        ([{"role": "user", "content": "x"}] * 500, {}, False),
        ([{"role": "user", "content": "x", "more": [{"text": "y" * 5000}]}], {}, False),
        ([{"role": "user", "content": "x"}], {"template_kwargs": {"text": "y" * 5000}}, False),
    ],
)
async def test_big_conversations_are_rendered_in_a_worker_thread(
    messages: list[dict[str, Any]], options: dict[str, Any], in_place: bool
) -> None:
    class RecordingTemplate(ChatTemplate):
        def render(self, messages: Any, **options: Any) -> str:
            threads.append(threading.current_thread())
            return super().render(messages, **options)

    threads: list[threading.Thread] = []
    renderer = Renderer(
        load_tokenizer(tiny_tokenizers.byte_level_json()), RecordingTemplate("short {{ text }}"), max_model_len=1000
    )

    await chat_ids(renderer, messages, **options)

    assert [thread is threading.current_thread() for thread in threads] == [in_place]


async def test_a_burst_of_big_texts_takes_few_threads_and_all_are_done() -> None:
    renderer, tokenizer = make_renderer()
    tokenizer.gate = threading.Event()

    async with trio.open_nursery() as nursery:
        for _ in range(3 * MAX_THREADS):
            nursery.start_soon(renderer.render_prompt, "a" * 5000)
        await tokenizer.wait_started(MAX_THREADS)
        await trio.testing.wait_all_tasks_blocked()

        assert len(tokenizer.threads) == MAX_THREADS
        tokenizer.gate.set()

    assert tokenizer.num_done == 3 * MAX_THREADS


async def test_a_cancelled_caller_leaves_at_once_and_its_thread_keeps_its_place_until_it_ends() -> None:
    renderer, tokenizer = make_renderer()
    tokenizer.gate = threading.Event()

    async with trio.open_nursery() as nursery:
        for _ in range(MAX_THREADS):
            nursery.start_soon(renderer.render_prompt, "a" * 5000)
        await tokenizer.wait_started(MAX_THREADS)
        nursery.cancel_scope.cancel()

    assert tokenizer.num_done == 0
    with trio.move_on_after(0) as scope:
        await renderer.render_prompt("a" * 5000)
    assert scope.cancelled_caught
    tokenizer.gate.set()
    with trio.fail_after(30):
        assert len(await renderer.render_prompt("a" * 5000)) == 5000


@pytest.mark.parametrize("render", ["prompt", "chat"])
async def test_a_caller_cancelled_before_the_start_gets_nothing(render: str) -> None:
    renderer, tokenizer = make_renderer()

    with trio.CancelScope() as scope:
        scope.cancel()
        if render == "prompt":
            await renderer.render_prompt("x")
        else:
            await chat_ids(renderer, [{"role": "user", "content": "x"}])

    assert scope.cancelled_caught
    assert tokenizer.threads == []


async def test_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    renderer, tokenizer = make_renderer(max_model_len=10)
    longest = tokenizer.max_token_chars
    assert longest == 8

    with pytest.raises(PromptTooLongError, match=r"maximum context length is 10 tokens.* 11 tokens or more"):
        await renderer.render_prompt("a" * 81)
    with pytest.raises(PromptTooLongError, match=r"maximum context length is 10 tokens.* 12 tokens or more"):
        await chat_ids(renderer, [{"role": "user", "content": "a" * 81}])

    assert tokenizer.threads == []
    assert len(await renderer.render_prompt("</think>" * 10)) == 10


@pytest.mark.parametrize("text", ["\udc97", "x" * 5000 + "\ud83d"])
async def test_lone_surrogates_are_refused_with_their_place(text: str) -> None:
    renderer, tokenizer = make_renderer()

    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        await renderer.render_prompt(text)
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        await chat_ids(renderer, [{"role": "system", "content": "x"}, {"role": "user", "content": text}])
    assert caught.value.param == "messages.1.content"
    assert tokenizer.threads == []


async def test_a_model_without_a_template_takes_prompts_only() -> None:
    renderer, _ = make_renderer(template=None)

    assert await renderer.render_prompt("hello")
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await chat_ids(renderer, [{"role": "user", "content": "x"}])


async def test_a_model_directory_gives_prompts_chats_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tiny_tokenizers.byte_level_json())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|end|>", "chat_template": "{{ bos_token }}hello"}')

    renderer = await trio.to_thread.run_sync(lambda: Renderer.load(tmp_path, 100, logits_width=512))

    chat = await chat_ids(renderer, [{"role": "user", "content": "x"}])
    assert [renderer.token_table.token_bytes(token_id) for token_id in chat] == [b"<|end|>", b"hello"]
    assert await renderer.render_prompt("hello") == chat[1:]
    assert len(renderer.token_table.bytes_by_id) == 512


def test_importing_the_renderer_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, trio_llm.frontend.rendering.renderer, trio_llm.frontend.text.logprobs\n"
        "import trio_llm.frontend.text.stop\n"
        "sys.exit(str({'torch', 'transformers', 'numpy'} & sys.modules.keys() or ''))"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert done.stderr.strip() == ""


def test_the_text_modules_import_no_tokenizer_library() -> None:
    script = (
        "import sys, trio_llm.frontend.text.detokenizer, trio_llm.frontend.text.logprobs, trio_llm.frontend.text.stop\n"
        "sys.exit(str({'tokenizers', 'trio', 'jinja2'} & sys.modules.keys() or ''))"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert done.stderr.strip() == ""


async def test_a_bad_word_that_the_tokenizer_makes_nothing_of_is_refused() -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.wordpiece_json())
    renderer = Renderer(tokenizer, ChatTemplate("x"), max_model_len=100)

    with pytest.raises(InvalidRequestError) as refused:
        await renderer.render_bad_words(["hello", " "])

    assert refused.value.param == "bad_words"
    assert await renderer.render_bad_words(["hello"]) == [tokenizer.encode("hello", add_special_tokens=False)]
