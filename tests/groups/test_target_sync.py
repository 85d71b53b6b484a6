"""Offsets that cannot be committed at the target are logged: one line for each change.

Method: a scripted target, whose reads fail as the test says.
"""

from types import SimpleNamespace

from logmirror.cluster.groups import GroupOffset, ReadOffsets
from logmirror.errors import UnavailableError, UsageError
from logmirror.groups.target_sync import TargetSync
from logmirror.model import TopicPartition

WHERE = TopicPartition("t", 0)
DONE = ReadOffsets({WHERE: GroupOffset(5, -1, "")}, {})
DENIED = UsageError("no permission", error="GROUP_AUTHORIZATION_FAILED")
LOST = UnavailableError("no coordinator")


def target(reads):
    """A target with one group; each read returns or raises the next of these."""

    def read(_group):
        found = reads.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    followed = SimpleNamespace(read=read, retain=lambda _groups: None)
    groups = SimpleNamespace(listed=list, followed=lambda: followed)
    return SimpleNamespace(groups=groups)


def test_a_group_that_cannot_be_read_is_logged_once_for_each_change(caplog):
    reads = [DENIED, DENIED, LOST, LOST, DONE, LOST, DONE, LOST, DENIED]
    failed = [str(one.message) if isinstance(one, Exception) else None for one in reads]
    sync, wanted = TargetSync(target(list(reads))), {"g": {WHERE: GroupOffset(5, -1, "")}}

    assert [sync.round(wanted).failed.get("g") for _ in reads] == failed

    lines = [one.facts for one in caplog.records if one.message == "group offsets not committed"]
    assert [one["error"] for one in lines] == [
        "no permission",
        *["no coordinator"] * 3,
        "no permission",
    ]
    assert all(one["group"] == "g" for one in lines)
