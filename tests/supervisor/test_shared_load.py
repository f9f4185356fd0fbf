"""SharedLoad: each front end sees what the others have, in other processes too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from trio_llm.config import EngineConfig
from trio_llm.errors import QueuedTokensError, QueueFullError
from trio_llm.frontend.requests.admission import AdmissionLedger, AdmissionLimits
from trio_llm.supervisor.shared_load import SharedLoad, open_load_file


@pytest.fixture
def fd() -> Iterator[int]:
    with open_load_file(3) as made:
        yield made


def test_each_front_end_sees_what_the_others_have(fd: int) -> None:
    with SharedLoad(fd, 0) as first, SharedLoad(fd, 1) as second, SharedLoad(fd) as supervisor:
        first.publish(3, 100)
        second.publish(4, 10)

        assert (first.num_requests, first.num_tokens) == (4, 10)
        assert (second.num_requests, second.num_tokens) == (3, 100)
        assert (supervisor.num_requests, supervisor.num_tokens) == (7, 110)

        supervisor.clear(0)
        assert (second.num_requests, second.num_tokens) == (0, 0)


def test_the_front_end_with_clearly_more_connections_than_another_lets_that_one_accept(fd: int) -> None:
    with SharedLoad(fd, 0) as first, SharedLoad(fd, 1) as second, SharedLoad(fd, 2) as third:
        ours = first.turns
        for load in (second, third):
            load.turns.publish(10)

        assert not ours.is_ahead(14)
        assert ours.is_ahead(15)
        third.turns.publish(11)
        assert ours.is_ahead(15)
        second.turns.publish(11)
        assert not ours.is_ahead(15)
        first.clear(1)  # it accepts no more: nothing is left for it
        assert not ours.is_ahead(15)
        assert ours.is_ahead(16)


def test_what_another_process_writes_is_seen(fd: int) -> None:
    script = (
        "import sys\n"
        "from trio_llm.supervisor.shared_load import SharedLoad\n"
        "SharedLoad(int(sys.argv[1]), 2).publish(5, 6)"
    )
    subprocess.run([sys.executable, "-c", script, str(fd)], pass_fds=[fd], check=True, timeout=60)

    with SharedLoad(fd, 0) as first:
        assert (first.num_requests, first.num_tokens) == (5, 6)


def test_limits_hold_for_all_front_ends_together(fd: int) -> None:
    limits = AdmissionLimits.of(EngineConfig(max_num_queued_reqs=4, max_num_queued_tokens=100))
    with SharedLoad(fd, 0) as first, SharedLoad(fd, 1) as second:
        ours, theirs = (AdmissionLedger(limits, others=load) for load in (first, second))
        for number in range(3):
            ours.check(num_prompt_tokens=20)
            ours.add(number, 20)
        with pytest.raises(QueuedTokensError, match="60 prompt tokens"):
            theirs.check(num_prompt_tokens=50)
        theirs.check(num_prompt_tokens=20)
        theirs.add("a", 20)
        with pytest.raises(QueueFullError, match="4 requests"):
            ours.check()

        ours.prefill_done(0)
        ours.remove(1)
        assert (second.num_requests, second.num_tokens) == (2, 20)
        theirs.check(num_prompt_tokens=50)
