"""Crashes while offset gaps are filled: the next run finishes, every record at its offset.

The mirror ends by SIGKILL twenty times at the failpoints of gaps and of a missing head, in a topic
that is trimmed, compacted and full of transactions, and at random times while transactions are
written; once with a destination that allows markers, once with one that does not. Then the brokers
of a destination are restarted one after the other. Apache Kafka's console consumer decides, as in
test_gaps. `LOGMIRROR_TEST_KILLS` is the number of random kills (`make nightly`: 50),
`LOGMIRROR_TEST_SEED` repeats a run's choices.
"""

from __future__ import annotations

import functools
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product

import pytest

from kit.judges.copies import copy, copying, forget_connections, wait_for_end
from kit.judges.gaps import (
    COMPACTED,
    CREDENTIALS,
    Writer,
    allow_copies,
    log_bounds,
    look,
    look_at_all,
    plain_messages,
    secured_kafka,
    trim,
    writing_transactions,
)
from kit.runs.cleaning import clean, stop_cleaning
from kit.runs.inline_run import InlineRun, config_text, mirror_to_cluster
from kit.servers.cluster import KafkaCluster
from kit.tiers import KILLS
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.admin import Admin
from logmirror.errors import PositionError
from logmirror.failpoints import POINTS, VARIABLE

pytestmark = [pytest.mark.xdist_group("e2e-hole-kills"), pytest.mark.timeout(1200)]

SOURCE, RESTRICTED = "4.3.1", "3.9.2"
WAYS = ("markers", "transactions")


@pytest.fixture(scope="module")
def source(kafka_431):
    yield kafka_431
    forget_connections()


@pytest.fixture(scope="module")
def restricted(tmp_path_factory):
    broker = secured_kafka(RESTRICTED, tmp_path_factory.mktemp("restricted"))
    try:
        yield broker.start()
    finally:
        broker.remove()


@pytest.fixture(scope="module")
def destinations(source, restricted):
    """By kind of gap filling: the broker, and how a mirror reaches it."""
    return {
        "markers": (source, source.bootstrap, {}),
        "transactions": (restricted, restricted.address("SASL"), {"properties": CREDENTIALS}),
    }


def target_of(topic, way):
    return f"{topic}-by-{way}"


def mirror_of(destinations, topic, way, **more):
    """One that copies a topic of the source, and knows it under another name."""
    broker, address, keys = destinations[way]
    target = target_of(topic, way)
    if way == "transactions":
        allow_copies(broker, [target])
    source = destinations["markers"][1]
    return mirror_to_cluster(topic, source, address, name=target, topic=target, **keys) | more


def judge(source, topic, copies, partitions):
    """Let the console consumer compare a source and its copies."""
    sides = [(source, topic), *copies]
    truth, *found = look_at_all(
        functools.partial(look, broker.tools, broker.bootstrap, name, partitions)
        for broker, name in sides
    )
    for one in found:
        assert one.bounds == truth.bounds
        assert one.printed == truth.printed
    return truth


# At every named point

DEATHS = [
    ("head.filled", 1),
    ("head.deleted", 1),
    ("hole.begin", 1),
    ("hole.begin", 2),
    ("hole.joined", 1),
    ("hole.joined", 2),
    ("hole.marked", 1),
    ("hole.marked", 2),
    ("hole.filled", 1),
    ("hole.filled", 2),
    ("hole.filled", 3),
]
HEAD = 7
POINTS_TOPIC = "hole-points"


@pytest.fixture(scope="module")
def crashed(source, destinations, tmp_path_factory):
    """Where each copy stood after its run had died: by way and partition, one for each death."""
    folder = tmp_path_factory.mktemp("hole-points")
    source.create_topic(POINTS_TOPIC, partitions=len(DEATHS), config=COMPACTED)
    for partition in range(len(DEATHS)):
        write_points(source.bootstrap, partition)
    clean(source, POINTS_TOPIC, len(DEATHS))
    stop_cleaning(source, POINTS_TOPIC)
    mirrors = {way: mirror_of(destinations, POINTS_TOPIC, way) for way in WAYS}
    for way in WAYS:  # made once, before many want to make them
        destinations[way][0].create_topic(target_of(POINTS_TOPIC, way), partitions=len(DEATHS))

    def die(case):
        way, partition = case
        point, nth = DEATHS[partition]
        mirror = mirrors[way] | {"partition": partition}
        del mirror["partitions"]
        config = folder / f"{way}-{partition}.json"
        config.write_text(config_text(mirror))
        environment = {VARIABLE: f"{point}#{nth}"}
        with InlineRun(config, "--until-now", folder=folder, environment=environment) as run:
            assert run.wait() == -9, run.text
        bootstrap = destinations[way][0].bootstrap
        return log_bounds(bootstrap, target_of(POINTS_TOPIC, way), partition)

    cases = [
        (way, partition)
        for way, (partition, (point, _)) in product(WAYS, enumerate(DEATHS))
        if (way, point) != ("markers", "hole.joined")  # it joins nothing
    ]
    with ThreadPoolExecutor(6) as pool:  # they mostly wait for predecessors that there are not
        return dict(zip(cases, pool.map(die, cases), strict=True))


def write_points(bootstrap, partition):
    """A trimmed head, a marker, an aborted transaction, records, a marker, records of few keys."""
    now_ms = SYSTEM_CLOCK.now_ms()
    plain = Writer(bootstrap, POINTS_TOPIC, partition)
    one = Writer(bootstrap, POINTS_TOPIC, partition, transactional_id=f"points-{partition}")
    messages = plain_messages(60, seed=partition, start_ms=now_ms)
    plain.send(messages[:HEAD])
    plain.send(messages[HEAD:20])
    trim(bootstrap, POINTS_TOPIC, partition, HEAD)
    one.transaction(messages[20:30], commit=True)
    one.transaction(messages[30:33], commit=False)
    plain.send(messages[33:40])
    one.transaction(messages[40:50], commit=True)
    plain.send(messages[50:60])
    assert log_bounds(bootstrap, POINTS_TOPIC, partition) == (HEAD, 63)
    plain.send(plain_messages(60, seed=partition, keys=5, start_ms=now_ms))


@pytest.mark.gate("a process per failpoint; the simulation has them all")
def test_every_failpoint_of_gaps_and_heads_crashes():
    wanted = [point for point in POINTS if point.split(".")[0] in {"hole", "head"}]

    assert list(dict.fromkeys(point for point, _ in DEATHS)) == wanted


@pytest.mark.gate("a process per failpoint; the simulation has them all")
@pytest.mark.parametrize("way", WAYS)
def test_a_crash_leaves_the_state_that_its_failpoint_documents(crashed, way):
    # The first gap: a marker and an aborted transaction with its own. The second: a marker. The
    # third: what the cleaner left out.
    begin, end, second = 30, 35, 53
    left = {DEATHS[number]: crashed[way, number] for w, number in crashed if w == way}

    assert left["head.filled", 1] == (0, HEAD)
    assert left["head.deleted", 1] == (HEAD, HEAD)
    assert left["hole.begin", 1] == (HEAD, begin)
    assert left["hole.filled", 1] == (HEAD, end)
    assert left["hole.begin", 2] == (HEAD, second - 1)
    assert left["hole.filled", 2] == (HEAD, second)
    assert left["hole.filled", 3][1] > 63
    if way == "markers":  # a whole gap at once, as far as the source was read
        assert begin < left["hole.marked", 1][1] <= end
        assert begin < left["hole.marked", 2][1] <= second
    else:  # one by one; the last one is promised and may still come
        assert [left["hole.joined", nth][1] - begin for nth in (1, 2)] in ([0, 0], [0, 1])
        assert left["hole.marked", 1][1] - begin in {0, 1}
        assert left["hole.marked", 2][1] - begin in {0, 1, 2}


@pytest.mark.gate("a process per failpoint; the simulation has them all")
@pytest.mark.usefixtures("crashed")
def test_the_next_run_finishes_after_all_crashes(source, destinations):
    copy(*(mirror_of(destinations, POINTS_TOPIC, way) for way in WAYS))

    copies = [(destinations[way][0], target_of(POINTS_TOPIC, way)) for way in WAYS]
    truth = judge(source, POINTS_TOPIC, copies, len(DEATHS))
    assert all(bounds[0] == HEAD for bounds in truth.bounds.values())


# At random moments


@pytest.mark.gate("minutes of kills")
def test_kills_while_transactions_are_written_leave_exact_copies(source, destinations, tmp_path):
    seed = int(os.environ.get("LOGMIRROR_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"LOGMIRROR_TEST_SEED={seed}")  # noqa: T201  # pytest shows it when the test fails
    chooser, topic, partitions = random.Random(seed), "hole-kills", 2
    source.create_topic(topic, partitions=partitions)
    mirrors = [mirror_of(destinations, topic, way) for way in WAYS]
    copies = [(destinations[way][0], target_of(topic, way)) for way in WAYS]
    config = tmp_path / "config.json"
    config.write_text(config_text(*mirrors))
    ends = []
    with writing_transactions(source.bootstrap, topic, partitions=partitions, seed=seed):
        for _ in range(KILLS):
            with InlineRun(config, folder=tmp_path) as run:
                run.wait_for(" copied ")
                time.sleep(chooser.uniform(0, 0.6))
                assert run.alive, run.text
                run.kill()
            found = [log_bounds(b.bootstrap, name, n)[1] for b, name in copies for n in range(2)]
            ends.append(found)

    copy(*mirrors)

    truth = judge(source, topic, copies, partitions)
    grown = [before < after for before, after in pairwise(map(sum, ends))]
    assert sum(grown) > len(grown) / 2  # most of them died at work
    visible = sum(map(len, truth.rows.values()))
    assert 100 < visible < sum(end for _, end in truth.bounds.values()) / 1.5


# Restarts of brokers


@pytest.fixture
def cluster(tmp_path):
    with KafkaCluster(SOURCE, tmp_path / "cluster") as cluster:
        yield cluster


@pytest.mark.gate("a minute of restarts")
def test_a_rolling_restart_of_brokers_causes_no_undetected_anomaly(source, cluster, monkeypatch):
    """A broker that is restarted while it writes a marker may write it twice, which must be found.

    For each partition: the replica is exact, or the mirror has stopped because a log ends beyond a
    gap, and every record of the replica has the source's offset.
    """
    monkeypatch.setattr(Admin, "may_write_markers", lambda _: False)
    topic, partitions = "hole-restarts", 4
    source.create_topic(topic, partitions=partitions)
    left, damaged = set(range(partitions)), {}

    def mirror():
        found = mirror_to_cluster(topic, source.bootstrap, cluster.bootstrap)
        return found | {"partitions": sorted(left)}

    def note(error):
        assert error.facts["reason"] == "HoleTooLong", error
        damaged[error.facts["partition"]] = error
        left.remove(error.facts["partition"])

    with writing_transactions(source.bootstrap, topic, partitions=partitions, seed=1):
        try:
            with copying(mirror()):
                wait_for_end(cluster.address(1), topic, 20)
                for node in cluster.brokers:
                    cluster.wait_until_in_sync(topic, partitions=partitions)
                    cluster.restart_node(node)
        except PositionError as error:
            note(error)
    cluster.wait_until_in_sync(topic, partitions=partitions)
    while left:
        try:
            copy(mirror())
        except PositionError as error:
            note(error)
        else:
            break

    bootstrap = cluster.address(1)
    truth, found = look_at_all(
        functools.partial(look, tools, where, topic, partitions)
        for tools, where in ((source.tools, source.bootstrap), (cluster.tools, bootstrap))
    )
    for partition in left:
        assert found.bounds[partition] == truth.bounds[partition]
        assert found.printed[partition] == truth.printed[partition]
    for partition, error in damaged.items():
        end = found.bounds[partition][1]
        assert end == error.facts["found"] > error.facts["expected"]
        kept = [row for row in truth.rows[partition] if row.offset < error.facts["expected"]]
        assert found.rows[partition] == kept
