"""RequestStatus: where a request stands between its registration and its end, as a table.

Pure. `RequestState.move` is the only way from one status to another. docs/recovery.md draws the table, and
tests/test_recovery_page.py holds the drawing to it.
"""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["TRANSITIONS", "RequestStatus"]


class RequestStatus(enum.Enum):
    UNSENT = "unsent"
    """Its engine does not have it: there is none at the moment, or the request waits for its trial as a suspect."""
    SENT = "sent"
    """Its engine has it and owes it rows."""
    IDLE = "idle"
    """A session between two inputs: its engine owes it nothing, and may not have it after a restart."""
    EXPIRED = "expired"
    """Its engine dropped it, uncomputed, when its deadline passed. It is sent again if its reader reads on."""
    ABORTING = "aborting"
    """Over for its reader. Rows for it are dropped until the engine's last one."""
    GONE = "gone"
    """Over for the engine, too: the request is not registered any more."""


TRANSITIONS: Final[dict[RequestStatus, frozenset[RequestStatus]]] = {
    RequestStatus.UNSENT: frozenset({RequestStatus.SENT, RequestStatus.GONE}),
    RequestStatus.SENT: frozenset(
        {
            RequestStatus.UNSENT,
            RequestStatus.IDLE,
            RequestStatus.EXPIRED,
            RequestStatus.ABORTING,
            RequestStatus.GONE,
        }
    ),
    RequestStatus.IDLE: frozenset(
        {RequestStatus.UNSENT, RequestStatus.SENT, RequestStatus.ABORTING, RequestStatus.GONE}
    ),
    RequestStatus.EXPIRED: frozenset({RequestStatus.UNSENT, RequestStatus.SENT, RequestStatus.GONE}),
    RequestStatus.ABORTING: frozenset({RequestStatus.GONE}),
    RequestStatus.GONE: frozenset(),
}
