"""The durable form of a classic group: it is stored when it is stable or empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.groups.encoding import VERSION, put_int32, put_int64, put_text
from logmirror.broker.groups.values import GROUP, StateChange

if TYPE_CHECKING:
    from logmirror.broker.groups.members import Roster
    from logmirror.wire.frames import Cursor

CLASSIC: Final = b"\0"
"""The type of the group, after the version."""


class ClassicState(NamedTuple):
    """What is stored of a group besides its members."""

    generation: int
    protocol_type: str
    protocol: str | None
    leader: str | None
    empty_since_ms: int


def stored_group(group_id: str, state: ClassicState, roster: Roster) -> StateChange:
    """Return the durable form of a group."""
    value = b"".join(
        (
            bytes((VERSION,)) + CLASSIC,
            put_int32(state.generation),
            put_text(state.protocol_type),
            put_text(state.protocol),
            put_text(state.leader),
            put_int64(state.empty_since_ms),
            roster.put(),
        )
    )
    return StateChange(GROUP, group_id.encode(), value)


def read_group(cursor: Cursor, roster: Roster) -> ClassicState:
    """Read the durable form, after its version and type; the members go to the roster."""
    state = ClassicState(
        generation=cursor.int32(),
        protocol_type=cursor.name(compact=True),
        protocol=cursor.string(compact=True),
        leader=cursor.string(compact=True),
        empty_since_ms=cursor.int64(),
    )
    roster.restore(cursor)
    return state
