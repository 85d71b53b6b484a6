r"""One transactional ID: its producer, the state of its transaction, and how both are stored.

The states are Kafka's (KIP-98). A `Transaction` is a value: `coordinator` decides the next one.

    Empty ----> Ongoing ----> PrepareCommit ----> CompleteCommit
      ^            |  \-----> PrepareAbort -----> CompleteAbort
      |            |                                    |
      +--- InitProducerId, next transaction <-----------+         any idle state ----> Dead
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from logmirror.errors import CorruptionError

Partition = tuple[str, int]
"""Topic and partition number."""

Row = tuple[str, bytes, bytes | None]
"""Kind, key and new value of a row in the coordinators' store; None removes it."""

NO_ID: Final = -1
NO_EPOCH: Final = -1
LAST_EPOCH: Final = 32766
"""The last epoch that a client gets. Its transaction's markers may have the one after it."""

KIND: Final = "transaction"
"""The kind of the rows in the coordinators' store: the value of each transactional ID."""

_FORMAT: Final = 1


class State(enum.Enum):
    """Kafka's states, by the names that DescribeTransactions and ListTransactions show."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"


PREPARED: Final = frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT})
COMPLETE: Final = frozenset({State.COMPLETE_COMMIT, State.COMPLETE_ABORT})
IDLE: Final = COMPLETE | {State.EMPTY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """A transactional ID with its current or last transaction.

    Attributes:
        transactional_id: The ID.
        producer_id: The producer ID of its client.
        producer_epoch: The epoch that its client must have; while prepared, that of the markers.
        last_epoch: The epoch before the last increment, if a client may repeat the request that
            incremented it; else -1.
        previous_id: The producer ID before the last one was exhausted, or -1.
        next_id: The producer ID after this transaction, if its epochs are exhausted; else -1.
        timeout_ms: The client's `transaction.timeout.ms`.
        state: The state.
        partitions: Partitions to which it may have written.
        groups: Consumer groups for which it may have committed offsets.
        started_ms: When it began; -1 without a transaction.
        updated_ms: When it last changed; idle IDs expire by it.
        ended_ms: The timestamp of its markers. Increases with every transaction of the ID.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    last_epoch: int = NO_EPOCH
    previous_id: int = NO_ID
    next_id: int = NO_ID
    timeout_ms: int
    state: State = State.EMPTY
    partitions: frozenset[Partition] = frozenset()
    groups: frozenset[str] = frozenset()
    started_ms: int = -1
    updated_ms: int = -1
    ended_ms: int = -1

    @property
    def is_exhausted(self) -> bool:
        """Whether the producer ID has no further epoch for a client."""
        return self.producer_epoch >= LAST_EPOCH

    @property
    def is_commit(self) -> bool:
        """Whether its outcome is a commit."""
        return self.state in {State.PREPARE_COMMIT, State.COMPLETE_COMMIT}

    def to_bytes(self) -> bytes:
        """Return the stored form: JSON."""
        fields = asdict(self)
        del fields["transactional_id"]
        fields["state"] = self.state.value
        fields["partitions"] = sorted(self.partitions)
        fields["groups"] = sorted(self.groups)
        return json.dumps({"format": _FORMAT, **fields}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, transactional_id: str, data: bytes) -> Transaction:
        """Return the transaction of a stored value.

        Raises:
            CorruptionError: The bytes are not such a value.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            build = {_FORMAT: cls}[fields.pop("format")]
            fields["state"] = State(fields["state"])
            fields["partitions"] = frozenset((str(t), int(n)) for t, n in fields["partitions"])
            fields["groups"] = frozenset(fields["groups"])
            return build(transactional_id=transactional_id, **fields)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptionError(
                "stored transaction is damaged",
                transactional_id=transactional_id,
                cause=str(error),
            ) from error
