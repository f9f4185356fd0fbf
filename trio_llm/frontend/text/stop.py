"""Stop strings: find the first one in text that arrives in pieces, and never show a part of it.

Pure. Used by the output processor, once per request.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Cuts a text at the stop string that is complete first; if several are at once, at the one that is listed first.

    The answer does not depend on how the text is cut into pieces. Text is held back only while its end is the
    beginning of some stop string. One automaton per stop string (Knuth, Morris, Pratt) keeps how much of it the text
    ends with, so the cost per character has a bound and shown text is never looked at again.

    Args:
        stops: strings that are not empty. With none, all text is shown.
        include_stop: the stop string itself is shown.
    """

    __slots__ = ("_any_first_char", "_automata", "_held", "_include_stop", "_matched", "found")

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self.found: str | None = None
        """The stop string that ended the text."""
        self._include_stop = include_stop
        self._automata = [(stop, _fallbacks(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        """For each stop string: the length of its longest beginning that the text ends with."""
        self._held = ""
        """The end of the text that is not shown yet. Invariant: its length is `max(self._matched)`."""
        # A set of single characters: matched in one pass, nothing to backtrack into.
        chars = "".join(sorted({re.escape(stop[0]) for stop in stops}))
        self._any_first_char = re.compile(f"[{chars}]") if chars else None

    def feed(self, text: str) -> str:
        """Take the next text and return what may be shown now. After a stop string was found: nothing."""
        if self.found is not None:
            return ""
        first_char = self._any_first_char
        if first_char is None:
            return text
        position = 0
        num_held = len(self._held)
        while position < len(text):
            if not num_held:
                # Nothing is half matched: go on at the next character that can begin a stop string.
                candidate = first_char.search(text, position)
                if candidate is None:
                    return self._show(text, 0)
                position = candidate.start()
            complete = self._advance(text[position])
            position += 1
            if complete is not None:
                return self._end(complete, self._held + text[:position])
            num_held = max(self._matched)
        return self._show(text, num_held)

    def pass_through(self, text: str) -> str:
        """Take text in which no stop string counts, not even the beginning of one. Returns all text so far that was
        not shown."""
        if self.found is not None:
            return ""
        return self.finish() + text

    def finish(self) -> str:
        """The text is over. Returns what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._automata)
        return held

    def _advance(self, char: str) -> str | None:
        """Take one character. Returns the stop string that is complete with it."""
        complete = None
        matched = self._matched
        for index, (stop, fallbacks) in enumerate(self._automata):
            length = matched[index]
            while length and stop[length] != char:
                length = fallbacks[length]
            if stop[length] == char:
                length += 1
            matched[index] = length
            if length == len(stop) and complete is None:
                complete = stop
        return complete

    def _show(self, text: str, num_held: int) -> str:
        if not num_held and not self._held:
            return text
        whole = self._held + text
        self._held = whole[len(whole) - num_held :]
        return whole[: len(whole) - num_held]

    def _end(self, stop: str, text: str) -> str:
        self.found = stop
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(stop)]


@functools.lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each length of a beginning of `stop`: the length of its longest proper beginning that is also its end."""
    table = [0, 0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = table[length]
        if stop[length] == char:
            length += 1
        table.append(length)
    return tuple(table)
