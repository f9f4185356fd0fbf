"""`python -m benchmarks.sampler`: what choosing the next tokens costs, by option and batch size.

Steps of a batch that goes on. Logits are as wide as those of the embedded model; the k-th likeliest token has a share
of k^-1.5, in random order. Each sequence has 200 tokens of prompt and 50 generated. A step is `launch` and `wait`
together. What is compared is measured in turn, and the quickest step of each counts, since whatever else the machine
does only makes steps slower.

Cases, one JSON object a line, for each batch size:
    option    every row uses the option: milliseconds a step, and what comes on top of the plain rows it starts from
    mixed     half of the rows use it: milliseconds a step beside that of the two halves on their own and of plain rows
              alone. `ratio` is that to the sum of the halves: above 1, rows that do not use the option pay for it
    unused    rows that use nothing, for a sampler that has kept state of every option, beside one that never saw any:
              `ratio` must be 1.10 at most
    changing  the same rows, with one that leaves and one that comes at each step, beside a batch that goes on
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from trio_llm.engine.sampling.sampler import Sampler
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams

WIDTH = 49_152
"""Of the embedded model."""
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 200, 50
EOS = (2,)
MAX_RATIO = 1.10

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_k and top_p": {"top_k": 50, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0)},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(0, 10_000, 10))},
    "bad_words": {"bad_words": [[i] for i in range(20)] + [[i, i + 1, i + 2] for i in range(100)]},
    "min_tokens": {"min_tokens": 1_000_000},
    "logprobs": {"logprobs": 5},
}
ALL: dict[str, Any] = {name: value for fields in OPTIONS.values() for name, value in fields.items() if value != 0}
GREEDY_PENALTY: dict[str, Any] = {"temperature": 0, "frequency_penalty": 0.5}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64], help="default: 1 8 32 64")
    parser.add_argument("--steps", type=int, default=20, help="steps of each case (default: 20)")
    parser.add_argument(
        "--only", nargs="+", help="these options alone", choices=[*OPTIONS, "all", "greedy with frequency_penalty"]
    )
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    chosen = {"greedy": OPTIONS["greedy"], "all": ALL, "greedy with frequency_penalty": GREEDY_PENALTY} | OPTIONS
    for size in options.batch_sizes:
        logits = make_logits(size).to(device)
        for name, fields in chosen.items():
            if not options.only or name in options.only:
                measure_option(name, fields, logits, steps=options.steps)
        for fields in ({}, {"temperature": 0}):
            measure_unused(fields, logits, steps=options.steps)
            measure_changing(fields, logits, steps=options.steps)


def make_logits(size: int) -> torch.Tensor:
    torch.manual_seed(0)
    scores = torch.arange(1, WIDTH + 1).log().mul(-1.5)
    return torch.stack([scores[torch.randperm(WIDTH)] for _ in range(size)])


def measure_option(name: str, fields: dict[str, Any], logits: torch.Tensor, *, steps: int) -> None:
    size = len(logits)
    plain: dict[str, Any] = {"temperature": 0} if fields.get("temperature") == 0 else {}
    base, used = measure([Batch(logits, [plain] * size), Batch(logits, [fields] * size)], steps=steps)
    report("option", size, option=name, ms=used, plain_ms=base, added_ms=used - base)
    if size < 2 or fields == plain:
        return
    half, rest = logits[: size // 2], logits[size // 2 :]
    mixed, users, others, plain_ms = measure(
        [
            Batch(logits, [fields] * len(half) + [plain] * len(rest)),
            Batch(half, [fields] * len(half)),
            Batch(rest, [plain] * len(rest)),
            Batch(logits, [plain] * size),
        ],
        steps=steps,
    )
    report(
        "mixed",
        size,
        option=name,
        ms=mixed,
        users_alone_ms=users,
        others_alone_ms=others,
        plain_ms=plain_ms,
        ratio=mixed / (users + others),
    )


def measure_unused(fields: dict[str, Any], logits: torch.Tensor, *, steps: int) -> None:
    size = len(logits)
    seasoned, fresh = Batch(logits, [fields] * size), Batch(logits, [fields] * size)
    for batch in (Batch(logits, [one] * size, sampler=seasoned.sampler) for one in (*OPTIONS.values(), ALL)):
        batch.step()
    with_state, without = measure([seasoned, fresh], steps=steps * 5)
    ratio = with_state / without
    name = "greedy" if fields else "plain"
    report("unused", size, rows=name, ms=with_state, fresh_ms=without, ratio=ratio, passes=ratio <= MAX_RATIO)


def measure_changing(fields: dict[str, Any], logits: torch.Tensor, *, steps: int) -> None:
    size = len(logits)
    changing, steady = Batch(logits, [fields] * size), Batch(logits, [fields] * size)
    with_changes, without = measure([changing, steady], steps=steps, before=[changing.replace_one, lambda: None])
    name = "greedy" if fields else "plain"
    report("changing", size, rows=name, ms=with_changes, steady_ms=without, ratio=with_changes / without)


class Batch:
    """Rows that go on by a token a step. Their tokens are not those sampled, so that each step has the same to do."""

    def __init__(self, logits: torch.Tensor, fields: list[dict[str, Any]], *, sampler: Sampler | None = None) -> None:
        self.sampler = sampler or Sampler(EOS, width=WIDTH, device=logits.device)
        self._logits = logits
        self._rows = [make_sequence(seed, one) for seed, one in enumerate(fields)]
        self._previous = torch.full((len(fields),), 7, device=logits.device)

    def step(self) -> None:
        positions = [len(row.token_ids) for row in self._rows]
        self.sampler.launch(self._logits, self._rows, positions=positions, previous=self._previous).wait()
        for row in self._rows:
            row.token_ids.append(7)

    def replace_one(self) -> None:
        self._rows = [*self._rows[1:], make_sequence(0, {"temperature": self._rows[0].params.temperature})]


def make_sequence(seed: int, fields: dict[str, Any]) -> Sequence:
    params = {name: value for name, value in fields.items() if name != "bad_words"}
    count = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS
    return Sequence(
        request_id=str(seed),
        token_ids=[(seed + 31 * i) % 1000 for i in range(count)],
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        params=SamplingParams(**{"seed": seed, **params}),
        bad_words=fields.get("bad_words", []),
    )


def measure(batches: list[Batch], *, steps: int, before: list[Callable[[], None]] | None = None) -> list[float]:
    """Least milliseconds of a step of each, in turn, so that a busy moment of the machine hits all."""
    times: list[list[float]] = [[] for _ in batches]
    for number in range(steps + 2):
        for i, batch in enumerate(batches):
            if before is not None:
                before[i]()
            began = time.perf_counter()
            batch.step()
            if number >= 2:  # the first ones build what the others use
                times[i].append((time.perf_counter() - began) * 1e3)
    return [min(one) for one in times]


def report(case: str, batch_size: int, **values: Any) -> None:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps({"case": case, "batch_size": batch_size, **rounded}), flush=True)


if __name__ == "__main__":
    main()
