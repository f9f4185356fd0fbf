"""`python -m benchmarks.recovery`: engines killed under load: are the streams whole, and how long is the pause?

64 streams on the embedded model, greedy and sampled, some with log-probabilities, stop strings or two choices.
Meanwhile the engine process is ended by SIGKILL three times, each time when a certain share of it all was delivered.
Exit code 1 if a check fails.

Cases, one JSON object a line:
    float32    every stream is complete, and token for token what the same requests got before without a death. A
               difference is excused where the two likeliest tokens of the undisturbed run were closer than 0.001
    bfloat16   every stream is complete, and nothing of what was delivered before a death was changed, repeated or lost

`pause_s` is the longest silence after each death, over all streams together; `backoff_s` is the part of it that the
front end waits on purpose, and `start_s` is what the engine took to start at first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers
import trio

from trio_llm import AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams, open_llm
from trio_llm.frontend.core_client.restart_policy import RestartPolicy
from trio_llm.outputs import CompletionOutput, TokenLogprobs

CLOSE: Final = 1e-3
"""Between the log-probabilities of the two likeliest tokens: rounding may choose either."""
LOGPROB_TOLERANCE: Final = 1e-2
NUM_BLOCKS: Final = 600
PROMPTS: Final = (
    "The capital of France is",
    "Once upon a time there was a small fox who",
    "A list of prime numbers: 2, 3, 5,",
    "To bake bread you need",
    "The opposite of hot is",
    "def fibonacci(n):\n",
    "Water boils at",
    "My favourite season is autumn, because the leaves turn red and yellow, the air is crisp, and in the evening we",
)
KINDS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    {"temperature": 0, "logprobs": 2, "ignore_eos": True, "output_kind": RequestOutputKind.CUMULATIVE},
    {"temperature": 1.0, "n": 2, "ignore_eos": True},
    {"temperature": 0, "stop": (" the", "\n\n"), "min_tokens": 5},
    {"temperature": 0.9, "stop": (" a", " of"), "min_tokens": 5, "logprobs": 1, "include_stop_str_in_output": True},
    {"temperature": 0, "frequency_penalty": 0.5, "ignore_eos": True},
    {"temperature": 1.1, "top_k": 50, "ignore_eos": True, "output_kind": RequestOutputKind.CUMULATIVE},
)


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str
    params: SamplingParams

    @property
    def must_be_full(self) -> bool:
        """It ends by its length alone."""
        return self.params.ignore_eos and not self.params.stop


@dataclass(slots=True)
class Choice:
    """One choice of an answer, as far as it was delivered."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    is_rewritten: bool = False
    """Something that was delivered was not there any more."""

    def take(self, output: CompletionOutput, *, is_all: bool) -> int:
        """Returns how many tokens are new.

        Args:
            is_all: the output has all there is of the choice, and not only what is new.
        """
        before = len(self.ids)
        if is_all:
            if output.token_ids[:before] != self.ids or not output.text.startswith(self.text):
                self.is_rewritten = True
            self.ids, self.text, self.logprobs = list(output.token_ids), output.text, list(output.logprobs or ())
        else:
            self.ids += output.token_ids
            self.text += output.text
            self.logprobs += output.logprobs or ()
        self.finish_reason = output.finish_reason or self.finish_reason
        return len(self.ids) - before


Answer = dict[int, Choice]
"""By index of the choice."""


def main() -> None:
    """Measure, print a line a case, and exit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="default: 64")
    parser.add_argument("--kills", type=int, default=3, help="deaths of the engine in each case (default: 3)")
    parser.add_argument("--tokens", type=int, default=40, help="of each answer in float32 (default: 40)")
    parser.add_argument("--bfloat16-tokens", type=int, default=16, help="of each answer in bfloat16 (default: 16)")
    parser.add_argument("--cases", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    options = parser.parse_args()
    is_good = True
    for case in options.cases:
        num_tokens = options.tokens if case == "float32" else options.bfloat16_tokens
        requests = make_requests(options.streams, num_tokens)
        line, problems = trio.run(measure, case, requests, options.kills)
        print(json.dumps(line), flush=True)
        for problem in problems:
            print(f"{case}: {problem}", file=sys.stderr)
        is_good = is_good and not problems
    sys.exit(0 if is_good else 1)


def make_requests(streams: int, num_tokens: int) -> list[Request]:
    return [
        Request(
            f"{PROMPTS[number // len(KINDS) % len(PROMPTS)]}",
            SamplingParams(seed=number, max_tokens=num_tokens, **KINDS[number % len(KINDS)]),
        )
        for number in range(streams)
    ]


async def measure(case: str, requests: list[Request], kills: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the line to print, and what is wrong."""
    config = EngineConfig(
        dtype="float32" if case == "float32" else "bfloat16",
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=2 * len(requests),
        max_num_batched_tokens=max(512, 2 * len(requests)),
        max_engine_restarts=kills,
    )
    began_s = time.perf_counter()
    async with open_llm(config) as llm:
        start_s = time.perf_counter() - began_s
        reference: list[Answer] | None = None
        if case == "float32":
            reference = await Load(f"{case}, undisturbed", [with_margins(one) for one in requests]).run(llm)
        load = Load(case, requests, kills)
        answers = await load.run(llm)
        model_dir = Path(llm.model_config.model_dir)
    tokenizer = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    problems = [
        text for one, answer in zip(requests, answers, strict=True) for text in find_faults(one, answer, tokenizer)
    ]
    if len(load.pauses_s) != kills:
        problems.append(f"{len(load.pauses_s)} engines were killed, not {kills}: the load ended before")
    policy = RestartPolicy(kills)
    line: dict[str, Any] = {
        "case": case,
        "streams": len(requests),
        "kills": len(load.pauses_s),
        "tokens": sum(len(choice.ids) for answer in answers for choice in answer.values()),
        "complete": sum(not find_faults(one, answer, tokenizer) for one, answer in zip(requests, answers, strict=True)),
        "unchanged": sum(not any(choice.is_rewritten for choice in answer.values()) for answer in answers),
    }
    if reference is not None:
        results = [compare(*pair) for pair in zip(reference, answers, strict=True)]
        line |= {word: results.count(word) for word in ("identical", "excused", "different")}
        problems += [f"stream {i} differs" for i, result in enumerate(results) if result == "different"]
    line |= {
        "pause_s": [round(pause_s, 2) for pause_s in load.pauses_s],
        "backoff_s": [policy.next_delay_s(0.0) for _ in load.pauses_s],
        "start_s": round(start_s, 2),
    }
    return line, problems


def with_margins(request: Request) -> Request:
    """The same request, with the log-probabilities of the two likeliest tokens. They change no token."""
    return Request(request.prompt, msgspec.structs.replace(request.params, logprobs=2))


class Load:
    """All requests at once, and an engine that is killed now and then."""

    def __init__(self, name: str, requests: Sequence[Request], kills: int = 0) -> None:
        self._name = name
        self._requests = requests
        self._answers: list[Answer] = [{} for _ in requests]
        self._num_tokens = 0
        self._most = sum(request.params.max_tokens or 0 for request in requests for _ in range(request.params.n))
        # Answers that a stop string ends are short, so the last part may never come.
        self._kill_at = [self._most * (i + 1) * 2 // (3 * (kills + 1)) for i in range(kills)]
        self._kills_s: list[float] = []
        self._deliveries_s: list[float] = []
        self._told_s = 0.0

    async def run(self, llm: AsyncLLM) -> list[Answer]:
        async with trio.open_nursery() as nursery:
            for request, answer in zip(self._requests, self._answers, strict=True):
                nursery.start_soon(self._read, llm, request, answer)
        self._tell(is_last=True)
        return self._answers

    @property
    def pauses_s(self) -> list[float]:
        """The longest silence between each death and the next one, or the end."""
        pauses_s = []
        for began_s, ended_s in zip(self._kills_s, [*self._kills_s[1:], float("inf")], strict=True):
            times_s = [began_s, *(one for one in self._deliveries_s if began_s < one < ended_s)]
            pauses_s.append(max((b - a for a, b in itertools.pairwise(times_s)), default=0.0))
        return pauses_s

    async def _read(self, llm: AsyncLLM, request: Request, answer: Answer) -> None:
        is_all = request.params.output_kind is RequestOutputKind.CUMULATIVE
        async with llm.generate(request.prompt, request.params) as stream:
            async for output in stream:
                for one in output.outputs:
                    self._num_tokens += answer.setdefault(one.index, Choice()).take(one, is_all=is_all)
                self._deliveries_s.append(time.perf_counter())
                if self._kill_at and self._num_tokens >= self._kill_at[0]:
                    self._kill_at.pop(0)
                    kill_engine()
                    self._kills_s.append(time.perf_counter())
                self._tell()

    def _tell(self, *, is_last: bool = False) -> None:
        now_s = time.perf_counter()
        if is_last or now_s - self._told_s > 2.0:
            self._told_s = now_s
            text = f"{self._name}: {self._num_tokens} of up to {self._most} tokens, {len(self._kills_s)} engines killed"
            print(text, file=sys.stderr, flush=True)


def kill_engine() -> None:
    """SIGKILL, for the engine process that this process has."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            if b"trio_llm.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def find_faults(request: Request, answer: Answer, tokenizer: tokenizers.Tokenizer) -> list[str]:
    """What shows that an answer is not whole: a choice without an end, or with more or fewer tokens than there must be,
    or whose text is not that of its tokens."""
    faults = []
    name = f"seed {request.params.seed}"
    if len(answer) != request.params.n:
        faults.append(f"{name}: {len(answer)} choices in place of {request.params.n}")
    for index, choice in answer.items():
        if choice.finish_reason not in ("stop", "length"):
            faults.append(f"{name}, choice {index}: it ended by {choice.finish_reason}")
        if choice.is_rewritten:
            faults.append(f"{name}, choice {index}: what was delivered was changed")
        if request.must_be_full and len(choice.ids) != request.params.max_tokens:
            faults.append(f"{name}, choice {index}: {len(choice.ids)} tokens in place of {request.params.max_tokens}")
        if request.must_be_full and tokenizer.decode(choice.ids) != choice.text:
            faults.append(f"{name}, choice {index}: its text is not that of its tokens")
        if request.params.logprobs is not None and [one.sampled.token_id for one in choice.logprobs] != choice.ids:
            faults.append(f"{name}, choice {index}: its log-probabilities are not those of its tokens")
    return faults


def compare(reference: Answer, answer: Answer) -> str:
    """`identical`, `different`, or `excused`: choices differ first where two tokens were equally good.

    Args:
        reference: has the two likeliest tokens of each position.
    """
    if reference.keys() != answer.keys():
        return "different"
    verdicts = {_compare_choices(reference[index], answer[index]) for index in reference}
    return next(word for word in ("different", "excused", "identical") if word in verdicts)


def _compare_choices(reference: Choice, choice: Choice) -> str:
    if choice.ids == reference.ids:
        is_same = (choice.text, choice.finish_reason) == (reference.text, reference.finish_reason) and all(
            abs(one.sampled.logprob - other.sampled.logprob) <= LOGPROB_TOLERANCE
            for one, other in zip(choice.logprobs, reference.logprobs, strict=False)
        )
        return "identical" if is_same else "different"
    pairs = zip(choice.ids, reference.ids, strict=False)
    position = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if position is None:
        return "different"  # one is the beginning of the other
    first, second = reference.logprobs[position].top[:2]
    return "excused" if first.logprob - second.logprob < CLOSE else "different"


if __name__ == "__main__":
    main()
