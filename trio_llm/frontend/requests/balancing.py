"""Balancer: which of several engines gets a request.

Pure. Used by `EngineRouter`. In this order:

1. an engine that the request names by `data_parallel_rank`;
2. the engine that had the last request of the same `session_id`, as long as it is up;
3. an engine that has computed what the prompt begins with, unless it has far more to do than the least busy one;
4. the engine with the least work: exactly what this front end's own requests still need, plus what the engine says that
   it owes to other front ends. Own work counts from the moment a request is sent, so late reports send no herd to the
   engine that was idle a moment ago.

Engines that are up come before those that are being started again, and those before the ones that are dead for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from trio_llm.config import EngineConfig
from trio_llm.errors import EngineUnavailableError, InvalidRequestError
from trio_llm.quoting import quote
from trio_llm.sampling import is_valid_text

__all__ = ["ANYWHERE", "MAX_SESSION_ID_CHARS", "Balancer", "EngineLoad", "Routing", "hash_beginnings"]

MAX_SESSION_ID_CHARS: Final = 256

_SHORTEST_TOKENS: Final = 32
"""Tokens of the shortest beginning that is compared: a block of the KV cache, less is never shared."""
_LONGEST_TOKENS: Final = 4096
"""Each beginning is twice as long as the one before it, up to this: eight of them."""
_MAX_BEGINNINGS: Final = 16384
_MAX_SESSIONS: Final = 16384
"""The least recently used ones are forgotten."""

_AFFINITY_WORK_PER_TOKEN: Final = 8
_AFFINITY_SHARE: Final = 0.25
"""An engine that has the beginning of a prompt gets the request as long as its work is above the least by at most this
share of the least, and this much per token that need not be computed again. So a hot prompt is computed on a second
engine when the first one gets busy, and a beginning that all prompts share does not keep the others idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What a request says about the engine that it wants."""

    data_parallel_rank: int | None = None
    """It goes to this engine alone, while that is not dead for good."""
    session_id: str | None = None
    """It follows the requests with the same one."""


ANYWHERE: Final = Routing()


@dataclass(slots=True, kw_only=True)
class EngineLoad:
    """One engine, as the choice sees it. Work: as `measure_work`."""

    is_up: bool = True
    is_dead: bool = False
    """No other incarnation follows the last one."""
    own_work: int = 0
    """What this front end's requests still need of it."""
    others_work: int = 0
    """What it owed to other front ends when it last said so."""


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Table(Generic[_Key, _Value]):
    """A dict that forgets the least recently used keys beyond `size`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[_Key, _Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: _Key) -> _Value | None:
        return self._values.get(key)

    def put(self, key: _Key, value: _Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._size:
            self._values.popitem(last=False)

    def items(self) -> list[tuple[_Key, _Value]]:
        return list(self._values.items())

    def replace(self, items: Iterable[tuple[_Key, _Value]]) -> None:
        """Keep these alone, in this order."""
        self._values = OrderedDict(items)


class Balancer:
    """Chooses engines for the requests of one front end.

    Args:
        num_engines: engines of this front end.
        prefix_affinity: prefer engines that have computed the beginning of a prompt.
        first_rank: `data_parallel_rank` of the first engine; the others follow.
        num_front_ends: how many share the engines. All of them see the same late reports and correct for them at the
            same time, so each does its part alone: with the whole correction each, engines would swing from idle to
            busy.
        front_end_index: of this one among them. Of engines that have as little to do, each begins with another one.
    """

    def __init__(
        self,
        num_engines: int,
        *,
        prefix_affinity: bool = True,
        first_rank: int = 0,
        num_front_ends: int = 1,
        front_end_index: int = 0,
    ) -> None:
        self._ranks = range(first_rank, first_rank + num_engines)
        self._order = [(front_end_index + offset) % num_engines for offset in range(num_engines)]
        """Which engine comes first of those with equal work."""
        self._prefix_affinity = prefix_affinity and num_engines > 1
        self._num_front_ends = num_front_ends
        self._engines_of_beginning: _Table[int, int] = _Table(_MAX_BEGINNINGS)
        """Hash of a beginning -> the engines that had a prompt with it: bit i is engine i."""
        self._engine_of_session: _Table[str, int] = _Table(_MAX_SESSIONS)

    @classmethod
    def of(
        cls, config: EngineConfig, *, num_engines: int, num_front_ends: int = 1, front_end_index: int = 0
    ) -> Balancer:
        return cls(
            num_engines,
            num_front_ends=num_front_ends,
            front_end_index=front_end_index,
            prefix_affinity=config.enable_prefix_affinity and config.enable_prefix_caching,
            first_rank=config.first_rank,
        )

    def check(self, routing: Routing) -> None:
        """
        Raises:
            InvalidRequestError: a value is wrong, or there is no engine of that rank here.
        """
        session_id, rank = routing.session_id, routing.data_parallel_rank
        if session_id is not None and not (
            isinstance(session_id, str) and 1 <= len(session_id) <= MAX_SESSION_ID_CHARS and is_valid_text(session_id)
        ):
            raise InvalidRequestError(
                f"session_id must be a string of 1 to {MAX_SESSION_ID_CHARS} characters", "session_id"
            )
        if rank is None:
            return
        if isinstance(rank, bool) or not isinstance(rank, int) or rank not in self._ranks:
            first, last = self._ranks[0], self._ranks[-1]
            here = f"from {first} to {last}" if first != last else f"{first}, the only rank of this server"
            raise InvalidRequestError(f"data_parallel_rank must be {here}, not {quote(rank)}", "data_parallel_rank")

    def choose(
        self,
        loads: Sequence[EngineLoad],
        routing: Routing = ANYWHERE,
        prompt_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
    ) -> int:
        """The index of the engine for a request, which is remembered for those that are like it.

        Args:
            loads: by the engine's index.
            routing: checked by `check`.
            cache_salt: prompts with another one share nothing.

        Raises:
            EngineUnavailableError: the engine that is asked for is dead for good.
        """
        beginnings = hash_beginnings(prompt_token_ids, cache_salt) if self._prefix_affinity else []
        rank = routing.data_parallel_rank
        if rank is None:
            index = self._choose(loads, routing.session_id, beginnings)
        else:
            index = rank - self._ranks[0]
            if loads[index].is_dead:
                raise EngineUnavailableError(f"the engine of data_parallel_rank {rank} is gone; leave the rank out")
        known = self._engines_of_beginning
        for beginning, _ in beginnings:
            known.put(beginning, (known.get(beginning) or 0) | 1 << index)
        if routing.session_id is not None:
            self._engine_of_session.put(routing.session_id, index)
        return index

    def forget(self, index: int) -> None:
        """This engine's incarnation is dead, and its KV cache with it: nothing is a reason to prefer it any more."""
        self._engines_of_beginning.replace(
            (beginning, rest)
            for beginning, engines in self._engines_of_beginning.items()
            if (rest := engines & ~(1 << index))
        )
        self._engine_of_session.replace(
            (session_id, engine) for session_id, engine in self._engine_of_session.items() if engine != index
        )

    def _choose(
        self, loads: Sequence[EngineLoad], session_id: str | None, beginnings: Sequence[tuple[int, int]]
    ) -> int:
        candidates = self._find_best(loads)
        works = {index: loads[index].own_work + loads[index].others_work / self._num_front_ends for index in candidates}
        last = None if session_id is None else self._engine_of_session.get(session_id)
        if last is not None and last in works:
            return last
        least = min(candidates, key=works.__getitem__)
        for beginning, num_tokens in reversed(beginnings):
            engines = self._engines_of_beginning.get(beginning) or 0
            having = [index for index in candidates if engines >> index & 1]
            if having:
                nearest = min(having, key=works.__getitem__)
                bound = works[least] * (1 + _AFFINITY_SHARE) + _AFFINITY_WORK_PER_TOKEN * num_tokens
                return nearest if works[nearest] <= bound else least
        return least

    def _find_best(self, loads: Sequence[EngineLoad]) -> list[int]:
        """The engines that are up, else those that are started again, else all."""
        return (
            [index for index in self._order if loads[index].is_up and not loads[index].is_dead]
            or [index for index in self._order if not loads[index].is_dead]
            or self._order
        )


def hash_beginnings(token_ids: Sequence[int], cache_salt: str | None) -> list[tuple[int, int]]:
    """Hashes of beginnings of a prompt, each with its number of tokens, the shortest first.

    Python's own hash is enough: two prompts with the same one meet on an engine, and nothing else comes of that.
    """
    beginnings = []
    num_tokens = _SHORTEST_TOKENS
    while num_tokens <= min(len(token_ids), _LONGEST_TOKENS):
        beginnings.append((hash((cache_salt, *token_ids[:num_tokens])), num_tokens))
        num_tokens *= 2
    return beginnings
