"""The embedded broker beside Apache Kafka, each with the log directories `a`, `b` and `c`.

`on_both` makes a test of a scenario: a generator that drives one broker, and yields what it sees
under labels. It runs with each broker at the same time, and what they show must be equal.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from pprint import pformat
from typing import TYPE_CHECKING, Final

from broker.moves.conftest import TwoDirs
from broker.moves.test_requests import fill
from kit.judges.raw_client import RawClient
from kit.runs.commands import wait_until
from kit.servers.apache import VERSIONS
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import ApacheKafka, Listener
from logmirror.broker.apis import Api
from logmirror.broker.security.users import put_user

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping
    from pathlib import Path

    from kit.judges.log_dirs_client import LogDirsClient

    Seen = Iterator[tuple[str, object]]
    Scenario = Callable[["Side", str], Seen]

OURS: Final = "here"
_USER, _PASSWORD = "alice", "secret"
_SUPER_USERS: Final = "User:ANONYMOUS"
_PLAIN: Final = {
    "sasl.enabled.mechanisms": "PLAIN",
    "plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
    f'user_{_USER}="{_PASSWORD}";',
}
_SASL: Final = "SASL_PLAINTEXT"
_CONFIG: Final[Mapping[str, object]] = {
    # A move behind a limit stays in progress: one fetch is less than a topic, and its bytes count
    # for a quarter of an hour.
    "replica.fetch.max.bytes": 10_000,
    "alter.log.dirs.replication.quota.window.num": 1_000,
    "log.segment.bytes": 1 << 20,  # the least
    # Nothing waits for the default intervals.
    "replica.fetch.backoff.ms": 20,
    "log.segment.delete.delay.ms": 50,
    "log.initial.task.delay.ms": 50,
    "log.retention.check.interval.ms": 50,
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": _SUPER_USERS,
}
_FOLDER: Final = re.compile(r"-?0(?:\.[0-9a-f]{32}-(?P<kind>future|delete))?")

_DAMAGED: Final = "test_e46_a_damaged_batch_in_the_source"
_OFFLINE: Final = "test_e15_nothing_moves_while_a_directory_is_offline"
_CORDONED: Final = "test_nothing_moves_to_a_cordoned_directory"
_HERE: Final = "The directory of the partition, if it is cordoned"
DIFFERENCES: Final[dict[tuple[str, str], str]] = {
    ("test_e84_the_name_of_the_folder_of_a_copy", "folder"): "The folder of a copy",
    ("test_e35_records_are_deleted_during_a_move", "code"): "DeleteRecords during a move",
    ("test_e34_retention_during_a_move", "records are deleted"): "Retention during a move",
    (_DAMAGED, "continues without a request"): "A damaged batch, after its repair",
    (_OFFLINE, "back without a restart"): "A log directory that could not be read for some time",
    (_CORDONED, "cancelled"): _HERE,
    (_CORDONED, "after the cancellation"): _HERE,
    (_CORDONED, "its directory"): _HERE,
    ("test_e55_a_fetch_session_continues_over_the_swap", "has a session"): "Fetch sessions",
}
"""By scenario and label: the row of docs/moves.md for what differs."""


class Side(TwoDirs):
    """One of the brokers."""

    __slots__ = ()

    @property
    def c(self) -> Path:
        """The third directory."""
        return self.b.parent / "c"

    @property
    def is_ours(self) -> bool:
        """Whether this is the embedded broker."""
        return isinstance(self.broker, EmbeddedBroker)

    @property
    def port(self) -> int:
        """The port of the plain listener."""
        return int(self.bootstrap.rpartition(":")[2])

    def name(self, path: str | Path) -> str:
        """`a`, `b` or `c`; any other text as it is."""
        return {str(self.a): "a", str(self.b): "b", str(self.c): "c"}.get(str(path), str(path))

    def shown(self, topic: str, partition: int = 0) -> dict[str, bool]:
        """The directories in which a partition is described, and whether as a copy."""
        with self.client() as client:
            found = client.where(topic, partition)
        return {self.name(path): one.is_future for path, one in found.items()}

    def folder(self, topic: str, place: Path) -> Path:
        """The folder of partition 0."""
        return place / topic / "0" if self.is_ours else place / f"{topic}-0"

    def paths(self, topic: str) -> list[Path]:
        """Every folder of partition 0, copies included."""
        pattern = f"{topic}/*" if self.is_ours else f"{topic}-*"
        return sorted(path for place in (self.a, self.b, self.c) for path in place.glob(pattern))

    def folders(self, topic: str) -> list[str]:
        """The same as `a`, `b future`, `c delete`."""
        found = []
        for path in self.paths(topic):
            place = path.parent.parent if self.is_ours else path.parent
            match = _FOLDER.fullmatch(path.name.removeprefix(topic))
            assert match is not None, path
            found.append(f"{self.name(place)} {match['kind'] or ''}".strip())
        return sorted(found)

    def has_logged(self, topic: str, words: str) -> bool:
        """Whether a line of the broker's log has both."""
        lines = self.broker.log.read_text(errors="replace").splitlines()
        return any(topic in line and words in line for line in lines)

    def copies(self, topic: str, place: str) -> list[str]:
        """Those in one directory."""
        return [name for name in self.folders(topic) if name.startswith(place)]

    def wait_folders(self, topic: str, *wanted: str) -> None:
        """Wait until partition 0 has these folders only."""
        wait_until(
            lambda: self.folders(topic) == list(wanted),
            what=lambda: f"folders: {self.folders(topic)}",
            timeout_s=60,
        )

    @contextlib.contextmanager
    def held(self, topic: str, count: int = 60) -> Iterator[LogDirsClient]:
        """Create and fill a topic, and begin its move to `b`, which stays in progress."""
        self.create(topic)
        fill(self, topic, count)
        self.limit(1)
        try:
            with self.client() as client:
                assert client.move_one(topic, self.b) == 0
                self.wait_folders(topic, "a", "b future")
                yield client
        finally:
            self.limit(None)

    @contextlib.contextmanager
    def without_permissions(self) -> Iterator[RawClient]:
        """Connect as a user who has no permission."""
        address = self.broker.port_of(_SASL) if self.is_ours else self.broker.address(_SASL)
        with RawClient(int(str(address).rpartition(":")[2])) as client:
            client.ask(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
            token = f"\0{_USER}\0{_PASSWORD}".encode()
            assert int(client.ask(Api.SASL_AUTHENTICATE, 2, auth_bytes=token).error_code) == 0
            yield client


@contextlib.contextmanager
def both_brokers(folder: Path) -> Generator[dict[str, Side], None, None]:
    """Start the embedded broker and Apache Kafka in each version, and return them by name."""
    found, kafka = {}, []
    ours = EmbeddedBroker(
        folder / OURS,
        protocols=("PLAINTEXT", _SASL),
        more_log_dirs=[str(folder / OURS / name) for name in "bc"],
        super_users=[_SUPER_USERS],
        segment_bytes=20_000,
    )
    put_user(ours.log_dir, _USER, _PASSWORD)
    for version in VERSIONS:
        own = folder / version
        places = [own / name for name in ("data", "b", "c")]
        config = {**_CONFIG, "log.dirs": ",".join(map(str, places))}
        listener = Listener(name=_SASL, protocol=_SASL, config=_PLAIN)
        kafka.append(ApacheKafka(version, own, config=config, listeners=[listener]))
    try:
        for name, broker in zip((OURS, *VERSIONS), (ours, *kafka), strict=True):
            broker.start()
            found[name] = Side(broker, folder / name / "data", folder / name / "b")
        yield found
    finally:
        for broker in kafka:
            broker.remove()
        if ours.alive:
            ours.kill()


def on_both(scenario: Scenario, versions: Collection[str] = VERSIONS) -> Callable[..., None]:
    """Make a test that runs a scenario with each broker, and compares what it yields."""

    def test(sides: dict[str, Side], topic_name: str) -> None:
        def seen(side: Side) -> dict[str, object]:
            found = list(scenario(side, topic_name))
            assert len(dict(found)) == len(found), "a label twice"
            return dict(found)

        used = {name: side for name, side in sides.items() if name in {OURS, *versions}}
        with ThreadPoolExecutor(len(used)) as pool:
            results = dict(zip(used, pool.map(seen, used.values()), strict=True))
        labels = dict.fromkeys(label for one in results.values() for label in one)
        differing = {}
        for label in labels:
            values = {name: one.get(label, "nothing") for name, one in results.items()}
            if any(value != values[OURS] for value in values.values()):
                differing[label] = values
        named = {label for name, label in DIFFERENCES if name == scenario.__name__}
        others = {label: values for label, values in differing.items() if label not in named}
        assert not others, pformat(others)
        assert not named - differing.keys(), "no longer differences"

    test.__name__ = scenario.__name__
    test.__doc__ = inspect.getdoc(scenario)
    test.__module__ = scenario.__module__
    return test


def on_newest(scenario: Scenario) -> Callable[..., None]:
    """Make such a test that leaves out older releases of Apache Kafka."""
    return on_both(scenario, VERSIONS[-1:])
