"""`logmirror moves`: moves of replicas between the log directories of Kafka brokers (KIP-113).

The brokers carry the moves out, and report what is in progress (DescribeLogDirs). So nothing is
lost if a command ends early.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from logmirror.app.move_plan import ANY, Entry, plan_text, read_plan, write_new
from logmirror.app.move_states import (
    balanced,
    chosen_moves,
    moving,
    parsed_name,
    places,
    shows_progress,
    with_rate,
)
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.errors import UnavailableError, UsageError
from logmirror.model import TopicPartition
from logmirror.move_reports import (
    LogDirBalance,
    MovedReplica,
    MoveOutcome,
    MovePlan,
    MoveSample,
    MoveStatus,
    ProposedMove,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from logmirror.clock import Clock
    from logmirror.cluster.log_dirs import LogDir

_BUDGET_MS: Final = 10_000
"""How long a request is retried."""

_SAMPLE_MS: Final = 1_000
_WINDOW: Final = 10
"""Samples over which a rate is the mean."""

_STALLED_MS: Final = 300_000
"""How long a command waits for moves of which none makes progress."""

_PER_REQUEST: Final = 200
"""Partitions in one request, so that each has its response soon."""

_BUCKET: Final = "s3://"
_NAMES_MAX: Final = 8
_NOT_FOUND: Final = "REPLICA_NOT_AVAILABLE"
_HINTS: Final = {
    "KAFKA_STORAGE_ERROR": "a log directory of the broker is offline, or the target has a folder "
    "of the partition already; see the broker's log",
    _NOT_FOUND: "check topic, partition and broker, and grant Describe on the topic; a partition "
    "whose log directory is offline is not found either",
    "INVALID_REPLICA_ASSIGNMENT": "the log directory is cordoned (cordoned.log.dirs)",
    "UNKNOWN_TOPIC_OR_PARTITION": "check topic and partition",
    "CLUSTER_AUTHORIZATION_FAILED": "grant Alter on the cluster",
    "POLICY_VIOLATION": "a partition of an archive is in no log directory",
    "INVALID_TOPIC_EXCEPTION": "the name of the topic is too long for a move",
}


class PreparedMoves(NamedTuple):
    """Moves that were not requested yet."""

    targets: dict[MovedReplica, str]
    """The log directory of each replica that is not there, or moves. Empty: there are none."""

    refused: list[MoveOutcome]
    """The replicas of the plan that are in no log directory, or not visible. They are not
    requested."""

    rollback: str
    """A plan with the log directories in which the replicas are now."""


class Moves:
    """The log directories of a cluster, for the commands.

    Args:
        client: Its client, which is closed with this.
        clock: For samples and deadlines.
    """

    def __init__(self, client: ClusterClient, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client, self._clock = client, clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def in_progress(self, names: Sequence[str] = ()) -> tuple[list[MoveStatus], list[str]]:
        """Return the moves of topics and partitions, and the names without a move.

        Args:
            names: TOPIC, or TOPIC:PARTITION. Empty: all moves.

        Raises:
            UsageError: A name is neither.
            UnavailableError: A broker did not respond in time.
        """
        wanted = {name: parsed_name(name) for name in names}
        return chosen_moves(moving(self._client.log_dirs.describe()), wanted)

    @staticmethod
    def names_in(text: str) -> list[str]:
        """Return the partitions that a plan moves, as TOPIC:PARTITION.

        Raises:
            UsageError: It is no plan.
        """
        entries = [one.partition for one in read_plan(text) if set(one.log_dirs) != {ANY}]
        return [f"{one.topic}:{one.partition}" for one in entries]

    def sampled(self) -> list[MoveStatus]:
        """Return the moves with their rates, from two samples a second apart.

        Raises:
            UnavailableError: A broker did not respond in time.
        """
        samples = self._samples(None)
        return list(next(samples).moves and next(samples).moves)

    def watch(
        self, wanted: Collection[MovedReplica] | None = None, *, timeout_s: float
    ) -> Iterator[MoveSample]:
        """Yield a sample each second, until no move is in progress.

        Args:
            wanted: Only these replicas. None: all.
            timeout_s: How long, at most.

        Raises:
            UnavailableError: The time is over, for five minutes no move has made progress, or a
                broker did not respond in time.
        """
        begun_ms = progress_ms = self._clock.monotonic_ms()
        before: tuple[MoveStatus, ...] = ()
        for sample in self._samples(wanted):
            yield sample
            if not sample.moves:
                return
            now_ms = self._clock.monotonic_ms()
            if shows_progress(before, sample.moves):
                progress_ms = now_ms
            before = sample.moves
            if now_ms - progress_ms >= _STALLED_MS:
                raise UnavailableError(
                    "no move has made progress for five minutes",
                    hint="if a move failed, the broker's log has the reason; or the limit is 0",
                    moves=_names(sample.moves),
                )
            if now_ms - begun_ms >= timeout_s * 1000:
                raise UnavailableError(
                    "the moves are not complete in time",
                    hint="they continue; `logmirror moves list` shows them",
                    timeout_s=timeout_s,
                    moves=_names(sample.moves),
                )

    def prepare(self, text: str) -> PreparedMoves:
        """Return what a plan requires, and the plan that restores what there is. Only reads.

        Raises:
            UsageError: It is no plan, has other replicas than the cluster, or names a log directory
                that a broker does not have.
            UnavailableError: A broker did not respond in time, or is not in the cluster.
        """
        entries = [one for one in read_plan(text) if set(one.log_dirs) != {ANY}]
        client = self._client.log_dirs
        assigned = client.assignments(sorted({one.partition.topic for one in entries}))
        _check_replicas(entries, assigned)
        wanted = {
            _replica(entry.partition, node): path
            for entry in entries
            for node, path in zip(entry.replicas, entry.log_dirs, strict=True)
            if path != ANY
        }
        dirs = self._described(wanted)
        _check_dirs(wanted, dirs)
        found = {one: path for one, path in places(dirs).items() if _partition(one) in assigned}
        in_motion = {one.replica for one in moving(dirs)}
        targets = {
            replica: path
            for replica, path in wanted.items()
            if replica in found and (found[replica] != path or replica in in_motion)
        }
        missing = [
            outcome_of(replica, path, _NOT_FOUND)
            for replica, path in wanted.items()
            if replica not in found
        ]
        now = {replica: found[replica] for replica in targets}
        return PreparedMoves(targets, missing, plan_text(_entries(assigned, now)))

    def request(self, targets: Mapping[MovedReplica, str]) -> list[MoveOutcome]:
        """Request moves, some hundred partitions at a time; returns the response for each.

        Raises:
            UnavailableError: A broker did not respond in time. Some of the moves may have begun.
        """
        by_broker: dict[int, list[MovedReplica]] = {}
        for replica in targets:
            by_broker.setdefault(replica.broker, []).append(replica)
        outcomes = []
        for node, replicas in by_broker.items():
            self._check_broker(node)
            for first in range(0, len(replicas), _PER_REQUEST):
                some = {_partition(one): one for one in replicas[first : first + _PER_REQUEST]}
                errors = self._client.log_dirs.move(
                    node, {partition: targets[one] for partition, one in some.items()}
                )
                outcomes += [
                    outcome_of(one, targets[one], errors[partition])
                    for partition, one in some.items()
                ]
        return outcomes

    def write_rollback(self, text: str, *, path: Path | None, beside: Path) -> Path:
        """Write a rollback plan durably, and return its path. No file is replaced.

        Args:
            text: The plan.
            path: The file. None: `rollback-TIME.json` with the time in UTC, beside another file.
            beside: That file.

        Raises:
            UsageError: The file exists, or cannot be written.
        """
        if path is not None:
            self.write_plan(path, text)
            return path
        now = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
        name = f"rollback-{now:%Y%m%dT%H%M%SZ}"
        for number in itertools.count(1):
            found = beside.parent / (f"{name}-{number}.json" if number > 1 else f"{name}.json")
            try:
                write_new(found, text)
            except FileExistsError:
                continue
            return found
        raise AssertionError

    @staticmethod
    def write_plan(path: Path, text: str) -> None:
        """Write a plan durably.

        Raises:
            UsageError: The file exists, or cannot be written.
        """
        try:
            write_new(path, text)
        except FileExistsError:
            raise UsageError(
                "the file of the plan exists", hint="choose another name", path=str(path)
            ) from None

    def plan(self) -> MovePlan:
        """Return the moves that balance the log directories of each broker. Only reads.

        Directories that are offline, or in a bucket, are left out. So are replicas that move.
        Cordoned directories get none.

        Raises:
            UsageError: No broker has two log directories, or a topic is not visible to this user.
            UnavailableError: A broker did not respond in time.
        """
        by_broker: dict[int, list[LogDir]] = {}
        for one in self._client.log_dirs.describe():
            if not one.error and not one.path.startswith(_BUCKET):
                by_broker.setdefault(one.node, []).append(one)
        several = {node: dirs for node, dirs in by_broker.items() if len(dirs) > 1}
        if not several:
            raise UsageError(
                "no broker has two log directories that are online and not in a bucket",
                hint="give a broker another one: --log-dir, or log.dirs of Apache Kafka",
                log_dirs=[one.path for dirs in by_broker.values() for one in dirs],
            )
        moves, rows = list[ProposedMove](), list[LogDirBalance]()
        for node, dirs in several.items():
            found, balances = balanced(node, dirs)
            moves += found
            rows += balances
        topics = sorted({move.replica.topic for move in moves})
        assigned = self._client.log_dirs.assignments(topics)
        if hidden := sorted({*topics} - {partition.topic for partition in assigned}):
            raise UsageError(
                "the replicas of topics cannot be read",
                hint="grant Describe on them; if they were deleted meanwhile, repeat the command",
                topics=hidden,
            )
        text = plan_text(_entries(assigned, {move.replica: move.target for move in moves}))
        return MovePlan(moves=tuple(moves), log_dirs=tuple(rows), text=text if moves else "")

    def _described(self, replicas: Collection[MovedReplica]) -> list[LogDir]:
        """Describe the log directories that have some replicas."""
        nodes = sorted({replica.broker for replica in replicas})
        for node in nodes:
            self._check_broker(node)
        partitions = {_partition(replica) for replica in replicas}
        return self._client.log_dirs.describe(nodes, partitions) if nodes else []

    def _check_broker(self, node: int) -> None:
        nodes = self._client.log_dirs.nodes()
        if node not in nodes:
            raise UnavailableError(
                "a broker of a replica is not in the cluster",
                hint="start it, or correct the plan",
                broker=node,
                brokers=nodes,
            )

    def _samples(self, wanted: Collection[MovedReplica] | None) -> Iterator[MoveSample]:
        """Yield samples without end, a second apart."""
        chosen = None if wanted is None else set(wanted)
        history: deque[tuple[int, dict[MovedReplica, int]]] = deque(maxlen=_WINDOW)
        before = chosen or set()
        while True:
            dirs = self._client.log_dirs.describe()
            now_ms = self._clock.monotonic_ms()
            moves = [one for one in moving(dirs) if chosen is None or one.replica in chosen]
            found, keys = places(dirs), {one.replica for one in moves}
            history.append((now_ms, {one.replica: one.copied_bytes for one in moves}))
            yield MoveSample(
                moves=tuple(with_rate(one, history, now_ms) for one in moves),
                ended=tuple((one, found.get(one, "")) for one in sorted(before - keys)),
            )
            before = keys
            self._clock.sleep_ms(_SAMPLE_MS)


def open_moves(bootstrap_servers: str, properties: Mapping[str, str]) -> Moves:
    """See `logmirror.api.open_moves`."""
    settings = connection_settings(bootstrap_servers, properties)
    return Moves(ClusterClient(replace(settings, retry_budget_ms=_BUDGET_MS)))


def outcome_of(replica: MovedReplica, log_dir: str, error: str) -> MoveOutcome:
    """Return the outcome for an error, or for none, with what to do about it."""
    hint = _HINTS.get(error, "see the broker's log") if error else ""
    return MoveOutcome(replica=replica, log_dir=log_dir, error=error, hint=hint)


def _replica(partition: TopicPartition, node: int) -> MovedReplica:
    return MovedReplica(partition.topic, partition.partition, node)


def _partition(replica: MovedReplica) -> TopicPartition:
    return TopicPartition(replica.topic, replica.partition)


def _entries(
    assigned: Mapping[TopicPartition, tuple[int, ...]], log_dirs: Mapping[MovedReplica, str]
) -> list[Entry]:
    """Return the entries of a plan with these log directories, and no other partition.

    They have the replicas of the cluster: Kafka's tool would move to others.
    """
    entries = []
    for partition, nodes in sorted(assigned.items()):
        paths = tuple(log_dirs.get(_replica(partition, node), ANY) for node in nodes)
        if set(paths) != {ANY}:
            entries.append(Entry(partition, nodes, paths))
    return entries


def _names(moves: Sequence[MoveStatus]) -> str:
    names = [str(move.replica) for move in moves]
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def _check_replicas(
    entries: Iterable[Entry], assigned: Mapping[TopicPartition, tuple[int, ...]]
) -> None:
    for entry in entries:
        found = assigned.get(entry.partition)
        if found is not None and set(found) != set(entry.replicas):
            raise UsageError(
                "the plan has other replicas than the cluster",
                hint="logmirror moves replicas between the log directories of a broker only; "
                "kafka-reassign-partitions also moves them between brokers",
                partition=str(entry.partition),
                replicas=list(found),
                planned=list(entry.replicas),
            )


def _check_dirs(wanted: Mapping[MovedReplica, str], dirs: Iterable[LogDir]) -> None:
    """Check that brokers have the directories of a plan, before anything is requested."""
    known: dict[int, list[str]] = {}
    for one in dirs:
        known.setdefault(one.node, []).append(one.path)
    for replica, path in wanted.items():
        if path not in known.get(replica.broker, ()):
            raise UsageError(
                "the broker has no such log directory",
                hint="write it as the broker does",
                error="LOG_DIR_NOT_FOUND",
                partition=str(replica),
                broker=replica.broker,
                log_dir=path,
                log_dirs=known.get(replica.broker, []),
            )
