"""KV events of the scheduler: applied in order, they give the hashes that the prefix cache knows, at any time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from tests.engine.scheduling.harness import BLOCK_SIZE, MiniEngine, make_limits
from tests.engine.scheduling.kv_replica import KVReplica
from tests.engine.scheduling.test_scheduler_properties import Traffic, limits_strategy
from tests.support.sequences import make_sequence
from trio_llm.config import FakeEngineConfig
from trio_llm.engine.scheduling.block_hash import salted
from trio_llm.engine.scheduling.kv_event_log import condense
from trio_llm.engine.scheduling.limits import SchedulerLimits
from trio_llm.sampling import SamplingParams
from trio_llm.wire.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

ONE_TOKEN = SamplingParams(max_tokens=1)
PROMPT = [i % 7 for i in range(3 * BLOCK_SIZE)]


def take(engine: MiniEngine) -> list[KVEvent]:
    log = engine.scheduler.kv_event_log
    assert log is not None
    events = log.take()
    assert not log
    return events


def known(engine: MiniEngine) -> set[bytes]:
    return set(engine.scheduler._blocks._pool._by_hash)


def serve(engine: MiniEngine, name: str, prompt: list[int], params: SamplingParams = ONE_TOKEN) -> list[KVEvent]:
    engine.add(make_sequence(name, prompt, params))
    engine.run(max_steps=100)
    return take(engine)


def an_engine(num_blocks: int = 64, **fake: int) -> MiniEngine:
    limits = make_limits(num_blocks=num_blocks, max_model_len=num_blocks * BLOCK_SIZE, logs_kv_events=True)
    return MiniEngine(limits, FakeEngineConfig(logits_width=16, **fake) if fake else None)  # type: ignore[arg-type]


class LoggedTraffic(Traffic):
    """The same traffic, with a router that follows."""

    @initialize(limits=limits_strategy(), run_ahead=st.integers(0, 1))
    def start(self, limits: SchedulerLimits, run_ahead: int) -> None:
        self.engine = MiniEngine(replace(limits, keeps_cache=True, logs_kv_events=True), run_ahead=run_ahead)
        self.replica = KVReplica(salted(cache_salt="salt"))

    @invariant()
    def the_router_knows_what_the_pool_knows(self) -> None:
        if hasattr(self, "engine"):
            for event in take(self.engine):
                self.replica.apply(event)
            assert self.replica.known == known(self.engine)

    def teardown(self) -> None:
        super().teardown()
        self.the_router_knows_what_the_pool_knows()


LoggedTraffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLoggedTraffic = LoggedTraffic.TestCase


def test_the_blocks_of_a_prompt_are_one_event_with_their_tokens() -> None:
    engine = an_engine()

    [event] = serve(engine, "a", [*PROMPT, 1])

    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, PROMPT, BLOCK_SIZE)
    assert set(event.block_hashes) == known(engine)


def test_what_is_known_is_not_stored_again_and_what_follows_has_it_as_its_parent() -> None:
    engine = an_engine()
    [first] = serve(engine, "a", PROMPT)
    # The last block is computed again, for the next token, beside the one that is known.
    [second] = serve(engine, "b", PROMPT, SamplingParams(max_tokens=BLOCK_SIZE + 1))

    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == engine.tokens["b"][:BLOCK_SIZE]


def test_a_block_known_of_another_in_the_middle_cuts_an_event_in_two() -> None:
    engine = an_engine()
    engine.add(make_sequence("a", PROMPT, ONE_TOKEN))
    engine.add(make_sequence("b", PROMPT, ONE_TOKEN))
    engine.run(max_steps=100)
    [whole] = take(engine)
    assert isinstance(whole, BlockStored)
    pool = engine.scheduler._blocks._pool
    pool.forget([pool._by_hash[whole.block_hashes[0]], pool._by_hash[whole.block_hashes[2]]])
    take(engine)

    first, last = serve(engine, "c", PROMPT)

    assert isinstance(first, BlockStored)
    assert isinstance(last, BlockStored)
    assert (first.block_hashes, last.block_hashes) == (whole.block_hashes[:1], whole.block_hashes[2:])
    assert last.parent_block_hash == whole.block_hashes[1]
    assert last.token_ids == PROMPT[-BLOCK_SIZE:]


def test_the_parent_of_the_first_block_of_a_salted_prompt_is_the_hash_of_the_salt() -> None:
    engine = an_engine()
    engine.add(make_sequence("a", PROMPT, ONE_TOKEN, cache_salt="mine"))
    engine.run(max_steps=100)

    [event] = take(engine)

    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == salted(cache_salt="mine")


def test_blocks_that_are_given_away_one_after_the_other_are_one_event_before_what_replaces_them() -> None:
    engine = an_engine(num_blocks=4)
    serve(engine, "a", PROMPT)

    removed, stored = serve(engine, "b", [9] * 3 * BLOCK_SIZE)

    assert isinstance(removed, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert len(removed.block_hashes) == 2
    assert known(engine) >= set(stored.block_hashes)


def test_a_parent_may_have_left_when_its_child_is_stored() -> None:
    """So a router must look from the beginning of a prompt, as the pool does, and stop at the first gap."""
    engine = an_engine()
    engine.add(make_sequence("a", PROMPT, SamplingParams(max_tokens=BLOCK_SIZE + 1)))
    engine.step()
    [stored] = take(engine)
    assert isinstance(stored, BlockStored)

    engine.scheduler.reset_prefix_cache()
    engine.run(max_steps=100)

    cleared, child = take(engine)
    assert cleared == AllBlocksCleared()
    assert isinstance(child, BlockStored)
    assert child.parent_block_hash == stored.block_hashes[-1]
    assert child.parent_block_hash not in known(engine)


def test_what_a_failed_row_has_computed_is_removed() -> None:
    engine = an_engine(failing_row_prompt=PROMPT[0])

    stored, removed = serve(engine, "a", PROMPT)

    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == set(stored.block_hashes)


def test_nothing_is_written_down_unless_it_is_asked_for() -> None:
    assert MiniEngine().scheduler.kv_event_log is None


# ------------------------------------------------------------------------------- a client far behind


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(0, 60), st.booleans())
def test_condensed_events_lead_to_the_same_cache_from_wherever_a_client_was(
    changes: list[int], num_seen: int, knows_all: bool
) -> None:
    """0 clears the cache; any other number stores a block, or removes it if it is there.

    A client that was attached later knows nothing of what was stored before, and must not be told less for it.
    """
    engine_knows: set[bytes] = set()
    events: list[KVEvent] = []
    at_seen: set[bytes] = set()
    for number, change in enumerate(changes):
        block_hash = bytes([change]) * 16
        if number == num_seen:
            at_seen = set(engine_knows)
        if change == 0:
            events.append(AllBlocksCleared())
            engine_knows.clear()
        elif block_hash in engine_knows:
            events.append(BlockRemoved([block_hash]))
            engine_knows.remove(block_hash)
        else:
            events.append(BlockStored([block_hash], None, [change], 1))
            engine_knows.add(block_hash)
    unseen = events[num_seen:]
    client_knows = at_seen if knows_all else set()
    whole = apply_events(client_knows, unseen)

    condensed = condense(unseen)

    assert apply_events(client_knows, condensed) == whole
    assert len(condensed) <= 2 + 6
    assert condense(condensed) == condensed


def apply_events(known: set[bytes], events: list[KVEvent]) -> set[bytes]:
    known = set(known)
    for event in events:
        match event:
            case BlockStored():
                known.update(event.block_hashes)
            case BlockRemoved():
                known.difference_update(event.block_hashes)
            case AllBlocksCleared():
                known.clear()
    return known


def test_condensing_splits_what_was_stored_together_if_a_part_of_it_is_gone() -> None:
    a, b, c = (bytes([number]) * 16 for number in range(3))
    stored = BlockStored([a, b, c], None, [1, 2, 3, 4, 5, 6], 2)

    condensed = condense([stored, BlockRemoved([b])])

    assert condensed == [BlockStored([a], None, [1, 2], 2), BlockStored([c], b, [5, 6], 2)]
