"""Server-sent events: bytes that arrive in pieces to the data of whole events.

Pure. Used by `trio-llm chat`. Format: the event stream of the HTML standard; only `data` fields are kept.
"""

from __future__ import annotations

import codecs

__all__ = ["EventParser"]


class EventParser:
    """Takes the body of a response in pieces. How it is cut does not change the events.

    Lines end in LF, CRLF or CR; comments and fields other than `data` are skipped; an event without data is none.
    An event that the end of the body cuts off is dropped, as the standard says.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._line = ""
        self._data: list[str] = []
        self._after_cr = False

    def feed(self, body: bytes) -> list[str]:
        """The data of every event that `body` completes, in order."""
        events = []
        for line in self._lines(self._decoder.decode(body)):
            if line:
                field, _, value = line.partition(":")
                if field == "data":
                    self._data.append(value.removeprefix(" "))
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _lines(self, text: str) -> list[str]:
        """Whole lines without their ends; what follows the last end waits for more."""
        if self._after_cr and text:
            # The CR ended a line already; an LF right behind it belongs to it.
            text = text.removeprefix("\n")
            self._after_cr = False
        self._after_cr = self._after_cr or text.endswith("\r")
        *whole, self._line = (self._line + text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
        return whole
