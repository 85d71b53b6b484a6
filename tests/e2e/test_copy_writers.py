"""Two mirrors of one replica, one of them paused: a zombie changes nothing when it resumes.

One kind of topic holds records of today, so that the destination keeps producer state and refuses
batches that do not continue the log. The other holds records of years ago, whose producer state the
destination drops within a second: there a deadline and the successor's waiting time must suffice.
See docs/decisions/0004-kafka-destination.md.
"""

import contextlib
import os
import signal
import time
from itertools import cycle, product

import psutil
import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.copies import anomalies, copy, end_of, forget_connections, wait_for_end
from kit.judges.partition_client import PartitionClient
from kit.judges.truth import Source
from kit.runs.commands import Run, wait_until, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster
from kit.runs.stopping_run import KERNEL, StoppingRun
from kit.runs.writer import writing
from kit.servers.apache import VERSIONS
from kit.servers.cluster import KafkaCluster
from kit.tiers import NIGHTLY
from logmirror.errors import PositionError

pytestmark = [pytest.mark.xdist_group("e2e-copy-writers"), pytest.mark.timeout(900)]

LONG_AGO_MS = 1_500_000_000_000
AGES = {"fresh": 0, "old": LONG_AGO_MS}
"""The time of the records, 0 for now."""

PAUSE_S = 20
MOMENTS = (
    ("produce.prepared", 4),
    ("produce.sent", 4),
    ("produce.answered", 4),
    ("commit.received", 1),
)


@pytest.fixture(scope="module")
def source(cli_broker):
    return cli_broker


@pytest.fixture(scope="module")
def destination(forgetful_kafka):
    yield forgetful_kafka
    forget_connections()


def filled(broker, topic, age, count=300):
    """A topic of many small batches."""
    broker.create_topic(topic)
    stamp_ms = AGES[age]
    messages = [m._replace(timestamp_ms=stamp_ms) for m in odd_messages(count, seed=len(topic))]
    produce(broker.bootstrap, topic, messages, config={"batch.num.messages": 3, "linger.ms": 5})
    return topic


def wait_for_more(broker, topics, *runs):
    """Wait until every one of these topics has grown."""
    before = {topic: end_of(broker.bootstrap, topic) for topic in topics}
    wait_until(
        lambda: (
            all(end_of(broker.bootstrap, topic) > end for topic, end in before.items())
            or not all(run.alive for run in runs)
        ),
        what=lambda: f"more than {before}:\n" + "\n".join(run.text for run in runs),
    )
    assert all(run.alive for run in runs), "\n".join(run.text for run in runs)


def stop_cleanly(*runs):
    for run in runs:
        run.signal(signal.SIGTERM)
    assert [run.wait() for run in runs] == [0] * len(runs), "\n".join(run.text for run in runs)


@contextlib.contextmanager
def growing(broker, topics):
    """Write to topics, by age."""
    with contextlib.ExitStack() as stack:
        for number, (topic, age) in enumerate(topics.items()):
            stack.enter_context(
                writing(broker.bootstrap, topic, partitions=1, seed=number, timestamp_ms=AGES[age])
            )
        yield


@pytest.mark.gate("a process per failpoint; the simulation has them all")
def test_a_mirror_paused_at_any_failpoint_changes_nothing_when_it_resumes(
    source, destination, tmp_path
):
    """Each stops at one moment of its way; one other takes all of their copies over."""
    topics = {age: filled(source, f"stops-{age}", age) for age in AGES}
    chosen = list(product(AGES, MOMENTS))
    if not NIGHTLY:  # each moment with one age, each age with two moments
        chosen = [one for one in chosen if one in zip(cycle(AGES), MOMENTS, strict=False)]
    copies = {f"stops-{age}-at-{moment}": (age, moment, nth) for age, (moment, nth) in chosen}
    mirrors = {
        name: mirror_to_cluster(
            topics[age],
            source.bootstrap,
            destination.bootstrap,
            name=name,
            topic=name,
            max_batch_bytes=0,
        )
        for name, (age, _, _) in copies.items()
    }
    fresh = [name for name in mirrors if "fresh" in name]
    with contextlib.ExitStack() as stack:
        sleepers = []
        for name, (_, moment, nth) in copies.items():
            config = write_config(tmp_path / f"{name}.json", mirrors[name])
            sleeper = StoppingRun(config, moment, nth, folder=tmp_path)
            sleepers.append(stack.enter_context(sleeper))
        for sleeper in sleepers:
            sleeper.wait_until_stopped()
        awake_at = time.monotonic() + PAUSE_S
        config = write_config(tmp_path / "successor.json", *mirrors.values())
        successor = stack.enter_context(InlineRun(config, folder=tmp_path))
        for name in mirrors:
            wait_for_end(destination.bootstrap, name, 300)
        stack.enter_context(growing(source, {topics["fresh"]: "fresh"}))
        wait_for_more(destination, fresh, successor)
        time.sleep(max(awake_at - time.monotonic(), 2))  # and a sweep of the destination
        for sleeper in sleepers:
            sleeper.signal(signal.SIGCONT)
        wait_for_more(destination, fresh, successor, *sleepers)
        time.sleep(2)
        stop_cleanly(successor, *sleepers)
    copy(*mirrors.values())

    for name, (age, _, _) in copies.items():
        found = anomalies(source.bootstrap, topics[age], destination.bootstrap, name)
        assert found == [], name


# Between the last look at the clock and the kernel, where logmirror cannot check again


@pytest.fixture(scope="module")
def late(source, destination, tmp_path_factory):
    """Two mirrors of old records, paused there and resumed after others had finished the replicas.

    One copy is at the embedded broker, which sweeps producers every ten minutes; the other at the
    broker that does so every second.
    """
    folder = tmp_path_factory.mktemp("late")
    ways = {"remembered": (destination, source), "forgotten": (source, destination)}
    mirrors = {
        topic: mirror_to_cluster(
            filled(origin, topic, "old"),
            origin.bootstrap,
            target.bootstrap,
            name=topic,
            max_batch_bytes=0,
        )
        for topic, (origin, target) in ways.items()
    }
    with contextlib.ExitStack() as stack:
        runs = {}
        for topic, mirror in mirrors.items():
            config = write_config(folder / f"{topic}.json", mirror)
            run = StoppingRun(config, KERNEL, 4, folder=folder)
            runs[topic] = stack.enter_context(run)
        for topic, (_, target) in ways.items():
            runs[topic].wait_until_stopped()
            assert end_of(target.bootstrap, topic) < 300
        copy(*mirrors.values())
        assert [end_of(target.bootstrap, topic) for topic, (_, target) in ways.items()] == [
            300,
            300,
        ]
        with PartitionClient(ways["forgotten"][1].bootstrap, "forgotten") as client:
            wait_until(lambda: not client.producers(), what=lambda: f"{client.producers()}")
        for run in runs.values():
            run.signal(signal.SIGCONT)
        yield runs, mirrors


def test_the_successors_batches_fence_requests_sent_after_the_last_check(late, source, destination):
    run, mirror = late[0]["remembered"], late[1]["remembered"]
    time.sleep(3)
    stop_cleanly(run)

    copy(mirror)

    assert anomalies(destination.bootstrap, "remembered", source.bootstrap) == []


def test_a_late_batch_is_detected_at_once_and_nothing_more_is_written(late, source, destination):
    """The destination has forgotten the successor, too: nothing can refuse the late batch."""
    run, mirror = late[0]["forgotten"], late[1]["forgotten"]

    assert run.wait(timeout_s=60) == PositionError.exit_code, run.text
    assert "reason=ForeignRecord" in run.text
    end = end_of(destination.bootstrap, "forgotten")
    assert end > 300, "the late batch stands behind the copy"
    with pytest.raises(PositionError) as caught:
        copy(mirror)
    assert caught.value.facts["reason"] == "SourceWentBackwards"
    produce(source.bootstrap, "forgotten", odd_messages(100, seed=3))
    with pytest.raises(PositionError) as caught:
        copy(mirror)
    assert caught.value.facts["reason"] == "ContentDiffers"
    assert end_of(destination.bootstrap, "forgotten") == end
    truth, found = (Source(b.bootstrap, "forgotten").rows(0) for b in (source, destination))
    assert found[:300] == truth[:300]


# Both awake, on Spark, and a broker that stops


def test_two_mirrors_at_once_make_one_exact_copy(source, destination, tmp_path):
    topics = {"at-once-fresh": "fresh", "at-once-old": "old"}
    for topic in topics:
        source.create_topic(topic)
    mirrors = [
        mirror_to_cluster(topic, source.bootstrap, destination.bootstrap, name=topic)
        for topic in topics
    ]
    config = write_config(tmp_path / "config.json", *mirrors)

    with (
        growing(source, topics),
        InlineRun(config, folder=tmp_path) as one,
        InlineRun(config, folder=tmp_path) as two,
    ):
        for topic in topics:
            wait_for_end(destination.bootstrap, topic, 1)
        for _ in range(5):
            wait_for_more(destination, topics, one, two)
            time.sleep(1)
        stop_cleanly(one, two)
    copy(*mirrors)

    for topic in topics:
        assert anomalies(source.bootstrap, topic, destination.bootstrap) == [], topic


def test_requests_delayed_in_a_paused_brokers_socket_change_nothing(source, destination, tmp_path):
    """The broker stops, the mirror dies, another begins, and then the broker reads on."""
    topics = {"socket-fresh": "fresh", "socket-old": "old"}
    for topic in topics:
        source.create_topic(topic)
    mirrors = [
        mirror_to_cluster(topic, source.bootstrap, destination.bootstrap, name=topic)
        for topic in topics
    ]
    config = write_config(tmp_path / "config.json", *mirrors)

    with growing(source, topics), InlineRun(config, folder=tmp_path) as first:
        for topic in topics:
            wait_for_end(destination.bootstrap, topic, 50)
        os.kill(destination.pid, signal.SIGSTOP)
        time.sleep(2)
        first.kill()
        with InlineRun(config, folder=tmp_path) as second:
            time.sleep(3)
            os.kill(destination.pid, signal.SIGCONT)
            wait_for_more(destination, topics, second)
            stop_cleanly(second)
    copy(*mirrors)

    for topic in topics:
        assert anomalies(source.bootstrap, topic, destination.bootstrap) == [], topic


@pytest.mark.gate("Spark, paused for a minute")
def test_a_paused_driver_and_paused_workers_on_spark_change_nothing(source, destination, tmp_path):
    """Of one mirror on Spark the driver is paused, of another the workers."""
    topics = {"spark-driver": "fresh", "spark-workers": "fresh"}
    mirrors, configs = {}, {}
    for topic in topics:
        source.create_topic(topic)
        mirrors[topic] = mirror_to_cluster(
            topic, source.bootstrap, destination.bootstrap, name=topic
        )
        configs[topic] = write_config(tmp_path / f"{topic}.json", mirrors[topic], master="local[1]")
    both = write_config(tmp_path / "both.json", *mirrors.values())

    with (
        growing(source, topics),
        Run(configs["spark-driver"], folder=tmp_path) as one,
        Run(configs["spark-workers"], folder=tmp_path) as two,
    ):
        for topic in topics:
            wait_for_end(destination.bootstrap, topic, 50)
        workers = workers_of(two)
        assert workers
        one.signal(signal.SIGSTOP)
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        awake_at = time.monotonic() + PAUSE_S
        with InlineRun(both, folder=tmp_path) as successor:
            wait_for_more(destination, topics, successor)
            time.sleep(max(awake_at - time.monotonic(), 0))
            one.signal(signal.SIGCONT)
            for worker in workers:
                worker.send_signal(signal.SIGCONT)
            wait_for_more(destination, topics, one, two, successor)
            stop_cleanly(successor)
        wait_for_more(destination, topics, one, two)
        stop_cleanly(one, two)
    copy(*mirrors.values())

    for topic in topics:
        assert anomalies(source.bootstrap, topic, destination.bootstrap) == [], topic


def workers_of(run):
    """The processes that carry slices out: the children of Spark's Python daemon."""
    found = []
    for process in run.processes():
        try:
            parent = process.parent()
            if parent and "logmirror.engine.executor" in parent.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:  # it has just ended, or its parent has
            continue
    return found


# A destination of three brokers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three replicas, two of which must have a record before it is acknowledged."""
    with KafkaCluster(VERSIONS[-1], tmp_path_factory.mktemp("cluster")) as started:
        yield started
        forget_connections()


@pytest.mark.gate("a cluster of three brokers")
def test_leaders_that_die_move_and_lack_replicas_leave_the_copy_exact(source, cluster, tmp_path):
    topics = {"led-fresh": "fresh", "led-old": "old"}
    for topic in topics:
        source.create_topic(topic)
    mirrors = [
        mirror_to_cluster(topic, source.bootstrap, cluster.bootstrap, name=topic)
        for topic in topics
    ]
    config = write_config(tmp_path / "config.json", *mirrors)

    with growing(source, topics), InlineRun(config, folder=tmp_path) as run:
        for topic in topics:
            wait_for_end(cluster.bootstrap, topic, 50)
            cluster.wait_until_in_sync(topic)
        cluster.kill_node(killed := cluster.leader("led-fresh"))
        wait_for_more(cluster, ["led-fresh"], run)
        cluster.start_node(killed)
        for topic in topics:
            cluster.wait_until_in_sync(topic)
        cluster.restart_node(cluster.leader("led-fresh"))
        wait_for_more(cluster, ["led-fresh"], run)

        cluster.wait_until_in_sync("led-fresh")
        leader = cluster.leader("led-fresh")
        others = [node for node in cluster.brokers if node != leader]
        for node in others:
            cluster.kill_node(node)
        time.sleep(5)  # longer than the session: one in-sync replica is too few
        for node in others:
            cluster.start_node(node)
        wait_for_more(cluster, topics, run)
        stop_cleanly(run)
    copy(*mirrors)

    for topic in topics:
        cluster.wait_until_in_sync(topic)
        assert anomalies(source.bootstrap, topic, cluster.bootstrap) == [], topic
