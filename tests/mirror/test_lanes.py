"""Lanes: which flows share one, and that a lane that waits does not hold up the others.

Method: the real service with its threads over scripted sources, and stores in memory of which one
does not respond until the test lets it.
"""

import contextlib
import logging
import threading
from dataclasses import replace

import pytest

from kit.fakes.scripted import InlineRunner, Log, ScriptedClient, archive_spec, batches
from kit.runs.commands import wait_until
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.properties import connection_settings
from logmirror.errors import UnavailableError
from logmirror.locations import FolderLocation, S3Location
from logmirror.mirror import lane as lane_module
from logmirror.mirror import service as service_module
from logmirror.mirror import waits
from logmirror.mirror.health import LaneProgress, StatusBoard
from logmirror.mirror.lane import LANES_MAX, lanes_of, seat_count
from logmirror.mirror.ports import KafkaSpec
from logmirror.mirror.service import LanePorts, Service
from logmirror.mirror.source_views import MirrorSpec
from logmirror.mirror.until import Until
from logmirror.testing import MemoryStore
from logmirror.to_archive.commit import Committer
from logmirror.to_archive.destination import ArchiveDestination

A, B = (connection_settings(f"{name}:9092", {}) for name in "ab")


def folder(root, mount):
    return archive_spec(location=FolderLocation(root, mount=mount), max_time_ms=100)


def bucket(name, endpoint="https://s3"):
    return archive_spec(location=S3Location(bucket=name, endpoint=endpoint))


def cluster(settings, topic="t"):
    return KafkaSpec(cluster=settings, topic=topic)


def mirror(source, *specs, name="m", until=None):
    destinations = tuple((f"d{number}", spec) for number, spec in enumerate(specs))
    return MirrorSpec(
        name=name,
        source=source,
        topic=name,
        partitions=None,
        destinations=destinations,
        chain_start=None,
        until=until,
    )


def sizes(mirrors, *, shares_reads=False):
    """How many destinations each lane serves."""
    lanes = lanes_of(mirrors, shares_reads=shares_reads)
    return sorted(sum(len(m.destinations) for m in group) for group in lanes.values())


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([folder("/a/x", "/a"), folder("/a/y", "/a")], [2]),
        ([folder("/a/x", "/a"), folder("/b/x", "/b")], [1, 1]),
        ([folder("/a", ""), folder("/b", "")], [1, 1]),  # no mount points are known
        ([bucket("one"), bucket("two")], [2]),
        ([bucket("one"), bucket("one", "https://other")], [1, 1]),
        ([cluster(A, "t"), cluster(A, "u")], [2]),
        ([cluster(A), cluster(B)], [1, 1]),
        ([cluster(A), folder("/a/x", "/a"), bucket("one")], [1, 1, 1]),
    ],
)
def test_destinations_that_stall_together_share_a_lane(specs, expected):
    assert sizes([mirror(A, *specs)]) == expected


def test_sources_have_lanes_of_their_own():
    spec = folder("/a/x", "/a")
    assert sizes([mirror(A, spec, name="m"), mirror(B, spec, name="n")]) == [1, 1]
    assert sizes([mirror(A, spec, name="m"), mirror(A, spec, name="n")]) == [2]


def test_archives_of_a_source_share_a_lane_if_the_run_ends():
    specs = [folder("/a/x", "/a"), bucket("one"), cluster(A)]
    assert sizes([mirror(A, *specs)], shares_reads=True) == [1, 2]


def test_the_number_of_lanes_is_limited_and_no_destination_is_lost():
    specs = [folder(f"/{number}", f"/{number}") for number in range(3 * LANES_MAX)]
    assert sizes([mirror(A, *specs)]) == [3] * LANES_MAX


def test_mirrors_that_end_share_no_lane_with_those_that_do_not():
    specs = [folder(f"/{number}", f"/{number}") for number in range(3 * LANES_MAX)]
    ending, endless = mirror(A, *specs, name="m", until=Until(offset=1)), mirror(A, *specs)
    lanes = lanes_of([endless, ending], shares_reads=False)
    assert sum(len(one.destinations) for group in lanes.values() for one in group) == 2 * len(specs)
    for group in lanes.values():
        assert len({one.until for one in group}) == 1


def test_a_lane_into_clusters_has_two_seats():
    specs = [folder("/a/x", "/a"), cluster(A)]
    assert seat_count(lanes_of([mirror(A, *specs)], shares_reads=False)) == 3


# -- threads ---------------------------------------------------------------------------------------


class Stall:
    """Makes operations wait until it is released."""

    def __init__(self):
        self.is_on = threading.Event()
        self.released = threading.Event()
        self.reached = threading.Event()

    def __call__(self, *_):
        if self.is_on.is_set():
            self.reached.set()
            self.released.wait()


@contextlib.contextmanager
def two_lanes(*, stalls="store"):
    """A service of mirrors `m` and `n` into stores of their own; `n` may stall."""
    stall, logs = Stall(), {name: Log(batches(0, 5)) for name in "mn"}
    clients = {name: ScriptedClient([logs[name]], topic=name) for name in "mn"}
    stores = {"/m": MemoryStore(), "/n": MemoryStore()}
    if stalls == "store":
        stores["/n"].before = stall
    else:
        poll = clients["n"].list_offsets
        clients["n"].list_offsets = lambda *a, **k: (stall(), poll(*a, **k))[1]
    mirrors = [
        replace(mirror(name, folder(f"/{name}", f"/{name}"), name=name), source=name)
        for name in "mn"
    ]

    def open_store(location):
        return stores[location.root]

    def ports():
        committer = Committer(open_store, clock=SYSTEM_CLOCK)
        return LanePorts(
            client=clients.__getitem__,
            brief_client=clients.__getitem__,
            destination=lambda spec: ArchiveDestination(spec, open_store, committer, SYSTEM_CLOCK),
        )

    runner = InlineRunner(clients.__getitem__, open_store, slots=2)
    made = Service(mirrors, ports=ports, runner=runner, writer_id="w", clock=SYSTEM_CLOCK)
    errors = []

    def run():
        try:
            made.run()
        except BaseException as error:  # noqa: BLE001  # the test reads it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield made, logs, stores, stall, thread, errors
    finally:
        stall.released.set()
        made.stop()
        # A stalled lane that `run` did not wait for ends here: it would write into the next test.
        for each in (thread, *_lanes()):
            each.join(60)
        assert not [each for each in (thread, *_lanes()) if each.is_alive()]


def _lanes():
    return [each for each in threading.enumerate() if each.name.startswith("lane-")]


def ends(store):
    names = [n for n in list(store.objects) if not n.startswith(".") and n.endswith(".parquet")]
    return max((int(n.rpartition("-")[2].split(".")[0]) + 1 for n in names), default=0)


def wait_for(store, end):
    wait_until(lambda: ends(store) == end, what=lambda: f"{end}: {ends(store)}", timeout_s=30)


@pytest.mark.parametrize("stalls", ["store", "source"])
def test_a_lane_that_waits_does_not_hold_up_another(stalls):
    with two_lanes(stalls=stalls) as (_, logs, stores, stall, _thread, _errors):
        for store in stores.values():
            wait_for(store, 5)
        stall.is_on.set()
        logs["n"].batches += batches(5, 10)
        assert stall.reached.wait(30)
        for end in (10, 15, 20):
            logs["m"].batches += batches(end - 5, end)
            wait_for(stores["/m"], end)
        assert ends(stores["/n"]) == 5
        stall.released.set()
        wait_for(stores["/n"], 10)


def test_a_stop_flushes_the_others_and_does_not_wait_for_a_stalled_lane(monkeypatch, caplog):
    monkeypatch.setattr(service_module, "FLUSH_MS", 500)
    monkeypatch.setattr(lane_module, "FLUSH_MS", 500)
    with two_lanes() as (made, logs, stores, stall, thread, errors):
        for store in stores.values():
            wait_for(store, 5)
        stall.is_on.set()
        logs["n"].batches += batches(5, 10)
        assert stall.reached.wait(30)
        logs["m"].batches += batches(5, 6)
        made.stop()
        thread.join(30)

        assert not thread.is_alive()
        assert errors == []
        assert (ends(stores["/m"]), ends(stores["/n"])) == (6, 5)
        assert "a stalled destination or source was not waited for" in caplog.text


def test_an_error_of_one_lane_ends_the_others():
    with two_lanes() as (_, logs, stores, _stall, thread, errors):
        for store in stores.values():
            wait_for(store, 5)
        broken = bytearray(batches(5, 10)[0])
        broken[-1] ^= 1
        logs["n"].batches.append(bytes(broken))
        thread.join(30)
        assert not thread.is_alive()
        assert [error.kind for error in errors] == ["corruption"]


def test_what_a_lane_waits_for_is_logged_within_seconds(monkeypatch, caplog):
    monkeypatch.setattr(waits, "FIRST_MS", 200)
    monkeypatch.setattr(lane_module, "_servers", lambda _cluster: "a:9092")
    caplog.set_level(logging.WARNING, logger="logmirror.mirror")
    with two_lanes(stalls="source") as (_, _logs, stores, stall, _thread, _errors):
        for store in stores.values():
            wait_for(store, 5)
        stall.is_on.set()
        wait_until(
            lambda: any("waiting: no response yet" in r.getMessage() for r in caplog.records),
            what=lambda: caplog.text,
            timeout_s=30,
        )
        (said,) = [r for r in caplog.records if "waiting" in r.getMessage()][:1]
        assert (said.facts["mirror"], said.facts["source"]) == ("n", "a:9092")
        assert said.facts["step"] == "poll"


def test_a_start_at_which_nothing_opens_fails_and_one_that_opens_something_does_not():
    with two_lanes() as (made, _, stores, *_):
        for store in stores.values():
            wait_for(store, 5)
        assert {health.state for health in made.health()} == {"running"}

    client = ScriptedClient([Log()], topic="m")

    def down(_names):
        raise UnavailableError("no response", server="a")

    client.describe_topics = client.topic = down
    ports = LanePorts(
        client=lambda _s: client, brief_client=lambda _s: client, destination=lambda _s: None
    )
    made = Service(
        [replace(mirror("m", folder("/m", "/m")), source="m")],
        ports=lambda: ports,
        runner=InlineRunner(client, MemoryStore()),
        writer_id="w",
        clock=SYSTEM_CLOCK,
    )
    with pytest.raises(UnavailableError, match="no response"):
        made.run()


def test_a_mirror_is_running_when_all_of_its_lanes_have_opened_it():
    board = StatusBoard(["m"], SYSTEM_CLOCK)
    lanes = [LaneProgress([("m", [name])], SYSTEM_CLOCK) for name in ("files", "bucket")]
    board.lanes_begin(lanes)
    board.mirror_opened("m", destinations=["files"])
    assert [m.state for m in board.mirrors()] == ["starting"]
    board.mirror_opened("m", destinations=["bucket"])
    assert [m.state for m in board.mirrors()] == ["running"]
