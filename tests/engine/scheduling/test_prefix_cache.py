"""The prefix cache, seen from the scheduler: what is computed, and what is not because it was before."""

from __future__ import annotations

import pytest

from tests.engine.scheduling.harness import BLOCK_SIZE, MiniEngine, answer_alone, make_limits
from tests.support.sequences import make_sequence
from trio_llm.config import FakeEngineConfig
from trio_llm.engine.scheduling.block_hash import salted
from trio_llm.engine.scheduling.sequence import Sequence
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import LogprobRow

PREFIX = [i % 5 for i in range(6 * BLOCK_SIZE)]
NUM_ANSWER_TOKENS = 3
PARAMS = SamplingParams(max_tokens=NUM_ANSWER_TOKENS)


def serve(engine: MiniEngine, sequence: Sequence) -> int:
    """Run a sequence to its end. How many of its tokens were computed."""
    engine.add(sequence)
    engine.run(max_steps=100)
    return sum(1 for name, _ in engine.num_computed if name == sequence.request_id)


def test_a_prompt_that_was_computed_before_is_not_computed_again_but_for_its_last_block() -> None:
    engine = MiniEngine()
    serve(engine, make_sequence("first", [*PREFIX, 7], PARAMS))

    num_computed = serve(engine, make_sequence("second", [*PREFIX, 8, 9], PARAMS))

    assert num_computed == 2 + NUM_ANSWER_TOKENS - 1
    assert engine.tokens["second"] == answer_alone([*PREFIX, 8, 9], PARAMS)


def test_of_a_prompt_that_is_known_whole_the_last_block_is_computed_for_the_next_token() -> None:
    engine = MiniEngine()
    first = serve(engine, make_sequence("first", PREFIX, PARAMS))
    second = serve(engine, make_sequence("second", PREFIX, PARAMS))

    assert first - second == len(PREFIX) - BLOCK_SIZE
    assert engine.tokens["second"] == engine.tokens["first"]


def test_what_was_generated_is_found_too() -> None:
    engine = MiniEngine()
    serve(engine, make_sequence("first", PREFIX, SamplingParams(max_tokens=2 * BLOCK_SIZE + 1)))

    conversation = [*PREFIX, *engine.tokens["first"]]
    second = make_sequence("second", conversation, PARAMS)
    serve(engine, second)

    assert second.num_cached_tokens == len(PREFIX) + 2 * BLOCK_SIZE


@pytest.mark.parametrize("budget", [1024, 13])
def test_choices_of_one_prompt_that_come_together_compute_it_once_but_for_its_last_block(budget: int) -> None:
    """n > 1, in the engine: four sequences with seeds of their own."""
    engine = MiniEngine(make_limits(max_num_batched_tokens=budget))
    prompt = [*PREFIX, 1, 2]
    params = [SamplingParams(max_tokens=5, seed=seed) for seed in range(4)]
    for i, one in enumerate(params):
        engine.add(make_sequence(str(i), prompt, one))
    engine.run(max_steps=100)

    for position in range(len(PREFIX)):
        assert sum(engine.num_computed[str(i), position] for i in range(4)) == 1
    assert [engine.tokens[str(i)] for i in range(4)] == [answer_alone(prompt, one) for one in params]
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == 4


def test_only_the_first_row_has_the_number_of_cached_tokens() -> None:
    engine = MiniEngine()
    serve(engine, make_sequence("first", PREFIX, PARAMS))
    engine.add(make_sequence("second", [*PREFIX, 1], PARAMS))

    rows = [engine.step()[0] for _ in range(3)]

    assert [row.num_cached_tokens for row in rows] == [len(PREFIX), 0, 0]


def test_the_step_that_admits_a_request_counts_what_it_found() -> None:
    engine = MiniEngine()
    serve(engine, make_sequence("first", PREFIX, PARAMS))
    engine.add(make_sequence("second", [*PREFIX, 1], PARAMS))
    counts = []
    for _ in range(2):
        engine.step()
        stats = engine.scheduler.stats()
        counts.append((stats.num_cached_tokens, stats.num_prompt_tokens))

    assert counts == [(len(PREFIX), 1), (0, 0)]


def test_another_salt_finds_nothing() -> None:
    engine = MiniEngine()
    for name, salt in (("none", None), ("mine", "me"), ("yours", "you")):
        sequence = make_sequence(name, [*PREFIX, 1], PARAMS)
        sequence.cache_root = salted(cache_salt=salt)
        serve(engine, sequence)
        assert sequence.num_cached_tokens == 0
    again = make_sequence("again", [*PREFIX, 1], PARAMS)
    again.cache_root = salted(cache_salt="me")
    serve(engine, again)

    assert again.num_cached_tokens == len(PREFIX)


def test_nothing_is_found_where_no_cache_is_kept_or_after_a_reset() -> None:
    without = MiniEngine(make_limits(keeps_cache=False))
    reset = MiniEngine()
    for engine in (without, reset):
        serve(engine, make_sequence("first", [*PREFIX, 1], PARAMS))
    reset.scheduler.reset_prefix_cache()

    for engine in (without, reset):
        sequence = make_sequence("second", [*PREFIX, 1], PARAMS)
        serve(engine, sequence)
        assert sequence.num_cached_tokens == 0


def test_log_probabilities_of_a_prompt_are_computed_although_it_is_in_the_cache() -> None:
    engine = MiniEngine()
    serve(engine, make_sequence("first", [*PREFIX, 1], PARAMS))
    scored: list[LogprobRow] = []

    engine.add(make_sequence("second", [*PREFIX, 1], SamplingParams(max_tokens=1, prompt_logprobs=0)))
    while engine.scheduler.has_unfinished:
        for row in engine.step():
            scored += row.prompt_logprobs or []

    assert len(scored) == len(PREFIX)


def test_a_request_whose_row_failed_leaves_nothing_to_be_found() -> None:
    engine = MiniEngine(fake=FakeEngineConfig(logits_width=16, failing_row_prompt=PREFIX[0]))
    serve(engine, make_sequence("first", [*PREFIX, 1], PARAMS))
    second = make_sequence("second", [*PREFIX, 1], PARAMS)
    serve(engine, second)

    assert engine.finals["first"].finish_reason == "error"
    assert second.num_cached_tokens == 0


def test_a_preempted_sequence_finds_what_was_not_overwritten() -> None:
    engine = MiniEngine(make_limits(num_blocks=8, max_model_len=32))
    older = engine.add(make_sequence("older", [1] * 8, SamplingParams(max_tokens=16)))
    newer = engine.add(make_sequence("newer", [2] * 8, SamplingParams(max_tokens=16)))

    engine.run(max_steps=200)

    assert (older.num_preemptions, newer.num_preemptions) == (0, 1)
    counts = [engine.num_computed["newer", position] for position in range(23)]
    assert 1 in counts[:8]
    for name, number in (("older", 1), ("newer", 2)):
        assert engine.tokens[name] == answer_alone([number] * 8, SamplingParams(max_tokens=16))


def test_a_long_prefix_shared_by_32_requests_costs_each_after_the_first_a_block_and_its_tail_at_most() -> None:
    engine = MiniEngine(make_limits(num_blocks=400, max_num_batched_tokens=64, max_model_len=1200))
    prefix = [(7 * i) % 16 for i in range(1024)]
    computed = [
        serve(engine, make_sequence(str(i), [*prefix, *[i % 16] * (1 + i % 7)], SamplingParams(max_tokens=1)))
        for i in range(32)
    ]

    assert computed[0] == 1025
    assert all(count <= BLOCK_SIZE + 1 + i % 7 for i, count in enumerate(computed) if i)
