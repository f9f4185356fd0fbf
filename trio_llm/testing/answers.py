"""AnsweringExecutor: a FakeExecutor that answers text with text, through a tokenizer whose ids are bytes.

Behind `FakeLLM`. The tokenizer and the chat template stand in the folder model/ beside this file.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trio_llm.config import FakeEngineConfig
from trio_llm.engine.executor.fake import FakeExecutor
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.engine.scheduling.step import RowError, SampledToken

__all__ = ["END", "LOGITS_WIDTH", "MODEL_DIR", "AnsweringExecutor", "read_text"]

MODEL_DIR: Final = Path(__file__).parent / "model"
"""The fake model's directory in Hugging Face form, without weights."""

_SPECIAL: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""The tokens of the ids from 256. An id below is a byte."""
LOGITS_WIDTH: Final = 256 + len(_SPECIAL)
END: Final = 256

_LAST_MESSAGE: Final = re.compile(r"<\|\w+\|>((?:(?!<\|\w+\|>).)*)<\|assistant\|>\Z", re.DOTALL)
_READABLE: Final = list(b" abcdefghijklmnopqrstuvwxyz")


def read_text(token_ids: list[int]) -> str:
    """The text of the ids. Bytes that are not UTF-8 show as U+FFFD."""
    parts = [bytes([i]) if i < 256 else _SPECIAL[i - 256].encode() for i in token_ids]
    return b"".join(parts).decode(errors="replace")


class AnsweringExecutor(FakeExecutor):
    """Says what `answers` has for a prompt, or for the last message of a conversation; else `answer`; else letters.

    Args:
        fake: limits and faults. Its `script`, if there is one, goes before all answers.
    """

    def __init__(self, fake: FakeEngineConfig, *, num_blocks: int) -> None:
        super().__init__(fake, num_blocks=num_blocks, model_dir=str(MODEL_DIR))
        self._choices = _READABLE
        self._has_script = bool(fake.script)
        self._begun: dict[tuple[str, int], bytes | None] = {}
        """The answers that were begun, by request and length of the prompt, which grows with a session's inputs. So a
        change of `answers` does not change them."""
        self.answers: Mapping[str, str] = {}
        self.answer: str | None = None
        self.faults: deque[SampledToken | RowError] = deque()
        """Results of the next rows that sample, instead of a token."""

    def _find_fault(self, sequence: Sequence) -> SampledToken | RowError | None:
        return self.faults.popleft() if self.faults else super()._find_fault(sequence)

    def _choose(self, sequence: Sequence, prompt_digest: int, index: int) -> int:
        key = sequence.request_id, sequence.num_prompt_tokens
        if key not in self._begun:
            self._begun[key] = self._find_answer(sequence.token_ids[: sequence.num_prompt_tokens])
        answer = self._begun[key]
        if answer is None or self._has_script:
            return super()._choose(sequence, prompt_digest, index)
        return answer[index] if index < len(answer) else END

    def _find_answer(self, prompt: list[int]) -> bytes | None:
        text = read_text(prompt)
        message = _LAST_MESSAGE.search(text)
        answer = self.answers.get(text)
        if answer is None and message:
            answer = self.answers.get(message[1])
        if answer is None:
            answer = self.answer
        return None if answer is None else answer.encode()
