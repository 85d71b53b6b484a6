"""A topic of a running broker, the rules for its name, and why a change of it is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.errors import PositionError

if TYPE_CHECKING:
    import uuid

    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.topic_configs import TopicConfigs

_LEGAL_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,248}")


class RefusedTopicError(Exception):
    """A topic cannot be created, changed or deleted. `code` is Kafka's error code for it."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class TopicDeletedError(PositionError):
    """The topic was deleted while a request waited for it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Topic:
    """A topic and the logs of its partitions, by number. Only `Topics` changes it."""

    name: str
    topic_id: uuid.UUID
    configs: TopicConfigs
    logs: tuple[PartitionLog, ...]
    is_archive: bool = False
    """Whether it is mounted from an archive, so that nothing of it can be changed."""


def check_name(name: str) -> None:
    """Check a topic name: Kafka's rules, and no leading dot, which marks the broker's own files.

    Raises:
        RefusedTopicError: The name is not allowed.
    """
    if not _LEGAL_NAME.fullmatch(name):
        reason = (
            "a topic name has 1 to 249 letters, digits, dots, dashes and underscores, "
            "and does not begin with a dot"
        )
        raise RefusedTopicError(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
