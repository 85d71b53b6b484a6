"""A mirror that stops, and what happens to the others.

Method: the real loop, planner, executor and committer over scripted sources and stores in memory,
one of each for every mirror; time moves only when the loop sleeps. Each test says what is wrong
with one of them, and when.
"""

import logging

import pytest

from kit.fakes.scripted import (
    InlineRunner,
    Log,
    ScriptedClient,
    SteppingClock,
    archive_spec,
    batches,
)
from logmirror.errors import (
    CorruptionError,
    LogmirrorError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.locations import FolderLocation
from logmirror.mirror.service import LanePorts, Service
from logmirror.mirror.source_views import MirrorSpec
from logmirror.testing import MemoryStore
from logmirror.to_archive.commit import Committer
from logmirror.to_archive.destination import ArchiveDestination


class Mirrors:
    """Mirrors by name, each of the topic of that name, with one destination or more.

    Each has a cluster of its own, and so a lane. Or all have one cluster and one file system.
    """

    def __init__(self, *names, on_fatal="exit", destinations=("d",), one_cluster=False):
        self.logs = {name: Log(batches(0, 20)) for name in names}
        self.clients = {name: ScriptedClient([self.logs[name]], topic=name) for name in names}
        self.cluster = OneCluster(self.clients)
        self.stores = {f"/{n}/{d}": MemoryStore() for n in names for d in destinations}
        self.clock = SteppingClock()

        def open_store(location):
            return self.stores[location.root]

        committer = Committer(open_store, clock=self.clock)
        self.runner = InlineRunner(self.client, open_store)
        self.service = Service(
            [
                MirrorSpec(
                    name=name,
                    source="all" if one_cluster else name,
                    topic=name,
                    partitions=None,
                    destinations=tuple(
                        (d, spec_of(f"/{name}/{d}", mount="/" if one_cluster else ""))
                        for d in destinations
                    ),
                    chain_start=None,
                )
                for name in names
            ],
            ports=lambda: LanePorts(
                client=self.client,
                brief_client=self.client,
                destination=lambda spec: ArchiveDestination(
                    spec, open_store, committer, self.clock
                ),
            ),
            runner=self.runner,
            writer_id="w",
            clock=self.clock,
            on_fatal=on_fatal,
            in_turns=True,
        )

    def client(self, source):
        return self.cluster if source == "all" else self.clients[source]

    def run_for(self, duration_ms, *, each_time=lambda: None):
        """Run, stopped after so much time; returns the error it ended with."""

        def on_sleep():
            each_time()
            if self.clock.ms >= duration_ms:
                self.service.stop()

        self.clock.on_sleep = on_sleep
        return ended(self.service.run)

    def states(self):
        return {name: found.state for name, found in self.health().items()}

    def health(self):
        return {found.mirror: found for found in self.service.health()}

    def offsets(self, name, destination="d"):
        """One past the last offset of what a mirror has published."""
        found = self.stores[f"/{name}/{destination}"].objects
        names = [n for n in found if n.endswith(".parquet") and not n.startswith(".")]
        return max((int(n.rpartition("-")[2].partition(".")[0]) + 1 for n in names), default=0)


def spec_of(root, mount=""):
    return archive_spec(
        location=FolderLocation(root, mount=mount), max_time_ms=1000, max_offsets=10
    )


def grow(log):
    log.batches.extend(batches(log.end, log.end + 1))


def ended(run, **arguments):
    try:
        run(**arguments)
    except LogmirrorError as error:
        return error
    return None


def spoil(mirrors, name, at):
    """Break a mirror in a way that is not retriable."""
    client = mirrors.clients[name]
    if at == "no topic":

        def missing(_names):
            raise UsageError("topic does not exist", topic="t")

        client.describe_topics = client.topic = missing
    elif at == "foreign file":
        mirrors.stores[f"/{name}/d"].objects["d/0/notes.txt"] = b"mine"
    elif at == "trimmed":
        mirrors.logs[name].batches, mirrors.logs[name].log_start = batches(8, 20), 8
    else:
        log = mirrors.logs[name]
        log.batches[1] = log.batches[1][:-3] + b"\xff" + log.batches[1][-2:]


KINDS = {
    "no topic": UsageError,
    "foreign file": CorruptionError,
    "trimmed": PositionError,
    "flipped bit": CorruptionError,
}


@pytest.mark.parametrize("at", KINDS)
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("until_now", [True, False])
def test_isolate_continues_the_others_and_ends_with_the_first_error(at, name, until_now, caplog):
    caplog.set_level(logging.ERROR)
    mirrors, other = Mirrors("a", "b", on_fatal="isolate"), {"a": "b", "b": "a"}[name]
    spoil(mirrors, name, at)
    if until_now:
        error, expected = ended(mirrors.service.run, until_now=True), 20
    else:
        log = mirrors.logs[other]
        error = mirrors.run_for(9000, each_time=lambda: grow(log))
        expected = log.end - 1
    assert type(error) is KINDS[at]
    assert mirrors.offsets(other) >= expected >= 20
    assert mirrors.offsets(name) == 0
    assert mirrors.states() == {name: "stopped", other: "running"}
    stopped = mirrors.health()[name]
    assert (stopped.kind, stopped.message) == (error.kind, error.message)
    (event,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert event.getMessage() == f"mirror stopped: {error.message}"
    assert (event.facts["mirror"], event.facts["kind"]) == (name, error.kind)


@pytest.mark.parametrize("at", KINDS)
@pytest.mark.mirror_v3("SUP-02")
def test_exit_ends_at_the_next_commit_boundary(at):
    mirrors = Mirrors("a", "b", one_cluster=True)
    spoil(mirrors, "a", at)
    error = mirrors.run_for(60_000)
    assert type(error) is KINDS[at]
    assert mirrors.clock.ms < 2000, "it continues no mirror"
    # What ran beside it in its tick is committed; at the opening nothing runs yet.
    assert mirrors.offsets("b") == (20 if at == "flipped bit" else 0)
    assert mirrors.states()["a"] == "stopped"


def test_the_code_is_that_of_the_first_error():
    mirrors = Mirrors("a", "b", "c", on_fatal="isolate", one_cluster=True)
    spoil(mirrors, "b", "trimmed")
    spoil(mirrors, "a", "flipped bit")
    assert type(ended(mirrors.service.run, until_now=True)) is PositionError
    assert mirrors.offsets("c") == 20


def test_when_no_mirror_is_left_the_process_ends():
    mirrors = Mirrors("a", "b", on_fatal="isolate")
    spoil(mirrors, "a", "flipped bit")
    spoil(mirrors, "b", "flipped bit")
    assert isinstance(mirrors.run_for(60_000), CorruptionError)
    assert mirrors.clock.ms < 2000
    assert mirrors.states() == {"a": "stopped", "b": "stopped"}


@pytest.mark.parametrize("on_fatal", ["exit", "isolate"])
@pytest.mark.mirror_v3("SUP-04")
def test_a_fatal_error_stops_all_flows_of_its_mirror(on_fatal):
    mirrors = Mirrors("a", "b", on_fatal=on_fatal, destinations=("d", "e"))
    log = mirrors.logs["a"]

    def each_time():
        if mirrors.clock.ms == 3000:
            mirrors.stores["/a/e"].objects["e/0/notes.txt"] = b"mine"
            mirrors.stores["/a/e"].before = refuse_once(mirrors.stores["/a/e"])
        if mirrors.clock.ms >= 3000:
            for each in mirrors.logs.values():
                grow(each)

    error = mirrors.run_for(12_000, each_time=each_time)
    assert isinstance(error, CorruptionError)
    assert mirrors.offsets("a", "d") < log.end, "its sound flow stops with it"
    assert (mirrors.offsets("b") > 30) == (on_fatal == "isolate")


def refuse_once(store):
    """Fail for now once, so that the position is looked for again, and the foreign file found."""

    def before(operation, _name):
        if operation == "publish":
            store.before = lambda *_: None
            raise UnavailableError("no space left")

    return before


class OneCluster:
    """Topics of one cluster, each scripted by itself; a request that names a missing one fails."""

    def __init__(self, clients):
        self.clients, self.gone = clients, set()

    def topic(self, name):
        return self.describe_topics([name])[name]

    def describe_topics(self, names):
        self.refuse(names)
        return {name: self.clients[name].topic(name) for name in names}

    def list_offsets(self, partitions, at, **options):
        self.refuse({partition.topic for partition in partitions})
        found = {}
        for partition in partitions:
            found |= self.clients[partition.topic].list_offsets([partition], at, **options)
        return found

    def try_list_offsets(self, partitions, at):
        return ScriptedClient.try_list_offsets(self, partitions, at)

    def describe_topic_configs(self, name):
        return self.clients[name].describe_topic_configs(name)

    def describe_configs_of_topics(self, names, keys):
        found = [self.clients[name].describe_configs_of_topics([name], keys) for name in names]
        return {name: configs for one in found for name, configs in one.items()}

    def fetch(self, partition, *arguments, **options):
        return self.clients[partition.topic].fetch(partition, *arguments, **options)

    def fetch_ahead(self, *_, **__):
        """Nothing is asked ahead."""

    def refuse(self, names):
        if self.gone & set(names):
            raise UsageError("topic does not exist", topic=min(self.gone))


@pytest.mark.parametrize("gone_at_ms", [0, 3000])
def test_one_missing_topic_in_a_request_stops_only_its_mirror(gone_at_ms):
    mirrors = Mirrors("a", "b", "c", on_fatal="isolate", one_cluster=True)

    def each_time():
        if mirrors.clock.ms >= gone_at_ms:
            mirrors.cluster.gone = {"b"}
        for log in mirrors.logs.values():
            grow(log)

    each_time()
    error = mirrors.run_for(12_000, each_time=each_time)
    assert isinstance(error, UsageError)
    assert mirrors.states() == {"a": "running", "b": "stopped", "c": "running"}
    assert mirrors.offsets("a") >= mirrors.logs["a"].end - 1
    assert mirrors.offsets("c") >= mirrors.logs["c"].end - 1
    assert mirrors.offsets("b") < mirrors.logs["b"].end - 20


def down_until(mirrors, ms):
    """A store that cannot be reached before a time."""

    def before(_operation, _name):
        if mirrors.clock.ms < ms:
            raise UnavailableError("no store responds")

    return before


def test_a_destination_unavailable_at_the_start_is_retried_while_others_continue():
    mirrors = Mirrors("a", "b", destinations=("d", "e"))
    mirrors.stores["/a/e"].before = down_until(mirrors, 8000)
    seen = []

    def each_time():
        seen.append((mirrors.clock.ms, mirrors.states()["a"], mirrors.offsets("a")))

    assert mirrors.run_for(30_000, each_time=each_time) is None
    assert [mirrors.offsets(n, d) for n in "ab" for d in "de"] == [20] * 4
    assert {state for ms, state, _ in seen if ms < 8000} == {"waiting"}
    assert {state for ms, state, _ in seen if ms > 25_000} == {"running"}
    assert {offset for ms, _, offset in seen if ms > 3000} == {20}


def test_a_source_unavailable_at_the_start_is_retried_while_others_continue():
    mirrors = Mirrors("a", "b")
    client = mirrors.clients["a"]
    response = client.describe_topics

    def describe_topics(names):
        if mirrors.clock.ms < 8000:
            raise UnavailableError("no broker responds")
        return response(names)

    client.describe_topics = describe_topics
    assert mirrors.run_for(30_000) is None
    assert (mirrors.offsets("a"), mirrors.offsets("b")) == (20, 20)


@pytest.mark.parametrize("on_fatal", ["exit", "isolate"])
def test_a_start_with_nothing_reachable_ends_as_unavailable(on_fatal):
    mirrors = Mirrors("a", "b", on_fatal=on_fatal)
    for store in mirrors.stores.values():
        store.before = down_until(mirrors, 10**9)
    assert isinstance(mirrors.run_for(60_000), UnavailableError)
    assert mirrors.clock.ms == 0


def test_until_now_does_not_retry_at_the_start_and_ends_with_the_error():
    mirrors = Mirrors("a", "b", on_fatal="isolate")
    mirrors.stores["/a/d"].before = down_until(mirrors, 10**9)
    assert isinstance(ended(mirrors.service.run, until_now=True), UnavailableError)
    assert mirrors.offsets("b") == 20
    mirrors = Mirrors("a", "b", on_fatal="exit")
    mirrors.stores["/a/d"].before = down_until(mirrors, 10**9)
    assert isinstance(ended(mirrors.service.run, until_now=True), UnavailableError)
    assert mirrors.offsets("b") == 0


def test_until_now_gives_up_on_a_store_that_stays_away_and_finishes_the_others():
    mirrors = Mirrors("a", "b", on_fatal="isolate")

    def before(operation, _name):
        if operation == "publish":
            raise UnavailableError("no space left")

    mirrors.stores["/a/d"].before = before
    assert isinstance(ended(mirrors.service.run, until_now=True), UnavailableError)
    assert mirrors.offsets("b") == 20
    assert mirrors.states() == {"a": "stopped", "b": "running"}


@pytest.mark.mirror_v3("SUP-03", "SUP-04")
def test_a_retriable_failure_is_waiting_and_then_running_again():
    mirrors, seen = Mirrors("a", "b"), []

    def before(operation, _name):
        if operation == "publish" and mirrors.clock.ms < 9000:
            raise UnavailableError("no space left", path="/a")

    mirrors.stores["/a/d"].before = before

    def each_time():
        health = mirrors.health()
        seen.append((mirrors.clock.ms, health["a"].state, health["a"].message))
        assert health["b"].state == "running"

    assert mirrors.states() == {"a": "starting", "b": "starting"}
    assert mirrors.run_for(40_000, each_time=each_time) is None
    assert {found[1:] for found in seen if 1500 < found[0] < 9000} == {("waiting", "no space left")}
    assert {found[1:] for found in seen if found[0] > 25_000} == {("running", "")}
    assert mirrors.offsets("a") == 20


def test_a_source_that_responds_again_is_running_before_a_slice_is_due():
    mirrors, seen = Mirrors("a"), []
    client = mirrors.clients["a"]
    response = client.list_offsets

    def list_offsets(partitions, at, **options):
        if 3000 < mirrors.clock.ms < 6000:
            raise UnavailableError("no broker responds")
        return response(partitions, at, **options)

    client.list_offsets = list_offsets

    def each_time():
        seen.append((mirrors.clock.ms, mirrors.states()["a"]))

    assert mirrors.run_for(20_000, each_time=each_time) is None
    assert {state for ms, state in seen if 3500 < ms < 6000} == {"waiting"}
    assert {state for ms, state in seen if ms > 12_000} == {"running"}
