"""ClientsOfACore: an engine core with any number of front ends, which take what is sent to them and check its form."""

from __future__ import annotations

from dataclasses import dataclass, field

from trio_llm.engine.clients import Addressed
from trio_llm.engine.core import EngineCore
from trio_llm.wire.codec import decode_from_engine, decode_to_engine, encode
from trio_llm.wire.messages import (
    Ack,
    AttachClient,
    DetachClient,
    EngineCoreOutput,
    EngineCoreOutputs,
    FromEngine,
    Heartbeat,
    KVEvent,
    Ready,
    ToEngine,
    UtilityResult,
)

__all__ = ["ClientsOfACore", "FrontEnd"]


@dataclass
class FrontEnd:
    """One incarnation of one client, and all that it was sent."""

    index: int
    engine_epoch: int
    messages: list[FromEngine] = field(default_factory=list)
    rows: list[EngineCoreOutput] = field(default_factory=list)
    results: list[UtilityResult] = field(default_factory=list)
    kv_events: list[KVEvent] = field(default_factory=list)
    num_taken: int = 0
    """Number of the newest `EngineCoreOutputs`."""

    def take(self, message: FromEngine) -> list[EngineCoreOutput]:
        """Take a message. Returns its rows."""
        assert message.epoch == self.engine_epoch
        self.messages.append(message)
        if isinstance(message, Heartbeat):
            assert message.step == self.num_taken, "a message is lost"
        if not isinstance(message, EngineCoreOutputs):
            return []
        self.num_taken += 1
        assert message.step == self.num_taken, "a message is lost or doubled"
        self.rows += message.outputs
        self.results += message.utility_results
        self.kv_events += message.kv_events
        return message.outputs

    def rows_of(self, request_id: str) -> list[EngineCoreOutput]:
        return [row for row in self.rows if row.request_id == request_id]

    def tokens_of(self, request_id: str) -> list[int]:
        return [token_id for row in self.rows_of(request_id) for token_id in row.new_token_ids]

    @property
    def outputs(self) -> list[EngineCoreOutputs]:
        return [message for message in self.messages if isinstance(message, EngineCoreOutputs)]

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return [message for message in self.messages if isinstance(message, Heartbeat)]


class ClientsOfACore:
    """What a loop and a link do, in memory and through the codec. Client 0 is there from the beginning.

    Args:
        engine_epoch: the core's.
    """

    def __init__(self, core: EngineCore, *, engine_epoch: int) -> None:
        self.core = core
        self._engine_epoch = engine_epoch
        self.front_ends = {0: FrontEnd(0, engine_epoch)}
        """Those that are attached."""
        self._epochs: dict[int, int] = {}

    def __getitem__(self, index: int) -> FrontEnd:
        return self.front_ends[index]

    def send(self, index: int, *messages: ToEngine) -> None:
        """Let the engine handle messages of a client. None is dropped."""
        for message in messages:
            assert self.core.handle(decode_to_engine(encode(message)), index) is None

    def attach(self, index: int) -> FrontEnd:
        """Attach the next incarnation of a client, in place of the one before if there is one."""
        epoch = self._epochs[index] = self._epochs.get(index, 0) + 1
        self.send(0, AttachClient(index, epoch, f"in {index}", f"out {index}"))
        front_end = self.front_ends[index] = FrontEnd(index, self._engine_epoch)
        return front_end

    def detach(self, index: int) -> FrontEnd:
        """Detach a client. Returns its front end."""
        self.send(0, DetachClient(index))
        return self.front_ends.pop(index)

    def acknowledge(self, index: int) -> None:
        """Let a client acknowledge all that it was sent."""
        self.send(index, Ack(self.front_ends[index].num_taken))

    def turn(self) -> dict[int, list[EngineCoreOutput]]:
        """One turn of the loop. Returns the rows that each client got."""
        self.core.take_link_changes()
        taken: dict[int, list[EngineCoreOutput]] = {}
        for batch in (self.core.take_answers, self.core.step, self.core.take_heartbeats):
            for addressed in batch():
                index, rows = self._deliver(addressed)
                taken.setdefault(index, []).extend(rows)
        self.core._scheduler.check()
        return taken

    def _deliver(self, addressed: Addressed) -> tuple[int, list[EngineCoreOutput]]:
        index, message = addressed
        assert index in self.front_ends, "a message to a client that is gone"
        front_end, message = self.front_ends[index], decode_from_engine(encode(message))
        assert front_end.messages or index == 0 or isinstance(message, Ready), "Ready comes first"
        return index, front_end.take(message)

    def run(self, *, acknowledging: tuple[int, ...] | None = None) -> None:
        """Turn until nothing is left to do.

        Args:
            acknowledging: the clients that acknowledge what they get; None: all.
        """
        for _ in range(5000):
            for index in self.front_ends if acknowledging is None else acknowledging:
                self.acknowledge(index)
            if not self.core.is_busy:
                return
            self.turn()
        raise AssertionError("the engine is never done")
