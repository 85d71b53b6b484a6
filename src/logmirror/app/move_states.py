"""What descriptions of log directories show: which moves there are, how fast, what is uneven."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from logmirror.app.balance import Volume, balance
from logmirror.errors import UsageError
from logmirror.move_reports import LogDirBalance, MovedReplica, MoveStatus, ProposedMove

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logmirror.cluster.log_dirs import LogDir, Replica
    from logmirror.model import TopicPartition


def places(dirs: Iterable[LogDir]) -> dict[MovedReplica, str]:
    """Return the log directory of each replica."""
    return {key: one.path for key, one, replica in _replicas(dirs) if not replica.is_future}


def moving(dirs: Sequence[LogDir]) -> list[MoveStatus]:
    """Return the moves, by replica. They are in progress, or failed."""
    now = {key: (one, found) for key, one, found in _replicas(dirs) if not found.is_future}
    moves = []
    for key, one, copy in _replicas(dirs):
        if copy.is_future:
            source, size_bytes = "", copy.size_bytes
            if key in now:
                source, size_bytes = now[key][0].path, now[key][1].size_bytes
            moves.append(
                MoveStatus(
                    replica=key,
                    source=source,
                    target=one.path,
                    copied_bytes=copy.size_bytes,
                    total_bytes=size_bytes,
                    offset_lag=copy.lag,
                )
            )
    return sorted(moves, key=lambda move: move.replica)


def _replicas(dirs: Iterable[LogDir]) -> Iterable[tuple[MovedReplica, LogDir, Replica]]:
    for one in dirs:
        for partition, replica in one.replicas.items():
            yield MovedReplica(partition.topic, partition.partition, one.node), one, replica


def with_rate(
    move: MoveStatus, history: Iterable[tuple[int, Mapping[MovedReplica, int]]], now_ms: int
) -> MoveStatus:
    """Return a move with its mean rate since the oldest sample that has it.

    Args:
        move: The move, as it is now.
        history: Times in milliseconds, and the bytes that were copied then, oldest first.
        now_ms: The time.
    """
    for then_ms, copied in history:
        if move.replica in copied and now_ms > then_ms:
            grown = max(0, move.copied_bytes - copied[move.replica])
            return replace(move, bytes_per_second=grown * 1000 / (now_ms - then_ms))
    return move


def shows_progress(before: Iterable[MoveStatus], now: Iterable[MoveStatus]) -> bool:
    """Whether a move has ended, or begun, or copied something, between two samples."""
    copied = {move.replica: move.copied_bytes for move in before}
    found = {move.replica: move.copied_bytes for move in now}
    return copied.keys() != found.keys() or any(found[key] > copied[key] for key in found)


def chosen_moves(
    moves: Sequence[MoveStatus], wanted: Mapping[str, tuple[str, int | None]]
) -> tuple[list[MoveStatus], list[str]]:
    """Return the moves that are named, all if nothing is, and the names without a move.

    Args:
        moves: All moves.
        wanted: By name the topic and the partition; None: all partitions of the topic.
    """
    if not wanted:
        return list(moves), []
    found, used = list[MoveStatus](), set[str]()
    for move in moves:
        named = {
            name
            for name, (topic, number) in wanted.items()
            if move.replica.topic == topic and number in {None, move.replica.partition}
        }
        if named:
            found.append(move)
            used |= named
    return found, [name for name in wanted if name not in used]


def parsed_name(name: str) -> tuple[str, int | None]:
    """Return the topic and the partition of TOPIC:PARTITION, or of TOPIC.

    Raises:
        UsageError: It is neither.
    """
    topic, colon, number = name.rpartition(":")
    if not colon:
        return name, None
    if not topic or not number.isascii() or not number.isdigit():
        raise UsageError("not a topic or a partition", hint="write TOPIC or TOPIC:3", found=name)
    return topic, int(number)


def balanced(node: int, dirs: Sequence[LogDir]) -> tuple[list[ProposedMove], list[LogDirBalance]]:
    """Return the moves that balance the directories of a broker, and what they do to each.

    A replica that moves already stays where it moves to, and what its copy lacks needs space there.
    """
    sizes: dict[TopicPartition, int] = {}
    in_motion: set[TopicPartition] = set()
    for each in dirs:
        for partition, one in each.replicas.items():
            if one.is_future:
                in_motion.add(partition)
            else:
                sizes[partition] = one.size_bytes
    volumes = [
        Volume(
            each.path,
            {key: sizes[key] for key in sorted(each.replicas.keys() - in_motion)},
            sum(sizes.get(key, 0) for key, one in each.replicas.items() if one.is_future),
            _free_bytes(each, sizes),
            each.is_cordoned,
        )
        for each in dirs
    ]
    before = {one.name: one.fixed_bytes + sum(one.replicas.values()) for one in volumes}
    after, moves = dict(before), []
    for step in balance(volumes):
        after[step.source] -= step.size_bytes
        after[step.target] += step.size_bytes
        moves.append(
            ProposedMove(
                replica=MovedReplica(step.replica.topic, step.replica.partition, node),
                source=step.source,
                target=step.target,
                size_bytes=step.size_bytes,
            )
        )
    rows = [
        LogDirBalance(broker=node, log_dir=name, before_bytes=count, after_bytes=after[name])
        for name, count in before.items()
    ]
    return moves, rows


def _free_bytes(one: LogDir, sizes: Mapping[TopicPartition, int]) -> int | None:
    """Return what can be written to a directory beside the moves to it; None: not known."""
    if one.usable_bytes is None:
        return None
    copies = [(key, copy.size_bytes) for key, copy in one.replicas.items() if copy.is_future]
    missing = sum(max(0, sizes.get(key, 0) - copied) for key, copied in copies)
    return max(0, one.usable_bytes - missing)
