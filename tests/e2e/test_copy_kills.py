"""A crash at any time leaves a replica that the next run finishes exactly, at the source's offsets.

The mirror ends by SIGKILL at every failpoint of replication to a cluster, and at random times while
producers write; so do the brokers at both ends. At the end a clean run finishes, and kcat and
aiokafka compare both clusters offset by offset. `LOGMIRROR_TEST_KILLS` is the number of kills
(`make nightly`: 50), `LOGMIRROR_TEST_SEED` repeats a run's choices.
"""

import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.copies import anomalies, copy, end_of, forget_connections, partition_anomalies
from kit.judges.truth import Source
from kit.runs.commands import Run, wait_until, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster
from kit.runs.writer import writing
from kit.tiers import KILLS
from logmirror.failpoints import POINTS, VARIABLE

pytestmark = [pytest.mark.xdist_group("e2e-copy-kills"), pytest.mark.timeout(1800)]

ON_SPARK = {2: "the driver", 6: "all processes"}
"""Which of the random kills hit a mirror on Spark, and what of it."""

WAYS = [p for p in POINTS if p.split(".")[0] in {"plan", "fetch", "produce", "commit"}]
DEATHS = [(point, nth) for point in WAYS for nth in (1, 4 if "produce" in point else 2)]
RECORDS = 600
SOURCE_TOPIC = "copied-at-crash-points"


@pytest.fixture(scope="module")
def brokers(cli_broker, forgetful_kafka):
    yield cli_broker, forgetful_kafka
    forget_connections()


# At every named point


@dataclass(frozen=True)
class Crashed:
    """What each dead run had appended, by partition, before the clean run."""

    source: Source
    copies: dict[tuple[str, int], Source]
    ends: dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def crashed(brokers, tmp_path_factory):
    """Every point's run, dead at its point; then one clean run over what all of them left."""
    source, destination = brokers
    folder = tmp_path_factory.mktemp("points")
    source.create_topic(SOURCE_TOPIC, partitions=2)
    for partition in range(2):
        messages = odd_messages(RECORDS, seed=partition)
        if partition == 0:  # current records: several batches are in flight; old ones go one by one
            messages = [message._replace(timestamp_ms=0) for message in messages]
        config = {"batch.num.messages": 20, "linger.ms": 5}
        produce(source.bootstrap, SOURCE_TOPIC, messages, partition=partition, config=config)
    mirrors = {death: mirror_of(death, source, destination) for death in DEATHS}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda death: die_at(death, mirrors[death], folder), DEATHS))
    copies = {
        death: Source(destination.bootstrap, name_of(death), partitions=range(2))
        for death in DEATHS
    }
    ends = {death: [found.bounds(n)[1] for n in range(2)] for death, found in copies.items()}
    copy(*mirrors.values())
    return Crashed(Source(source.bootstrap, SOURCE_TOPIC, partitions=range(2)), copies, ends)


def name_of(death):
    return "crash-points-{}-{}".format(*death)


def mirror_of(death, source, destination):
    return mirror_to_cluster(
        SOURCE_TOPIC,
        source.bootstrap,
        destination.bootstrap,
        name=name_of(death),
        topic=name_of(death),
        max_batch_bytes=0,
    )


def die_at(death, mirror, folder):
    """Run until the point is reached for the nth time."""
    config = write_config(folder / f"{name_of(death)}.json", mirror)
    environment = {VARIABLE: "{}#{}".format(*death)}
    with InlineRun(config, folder=folder, environment=environment) as run:
        assert run.wait(timeout_s=60) == -signal.SIGKILL, run.text


@pytest.mark.gate("a process per failpoint; the simulation has them all")
@pytest.mark.parametrize("death", DEATHS, ids="{0[0]}-{0[1]}".format)
def test_after_a_crash_at_a_failpoint_the_next_run_finishes_exactly(crashed, death):
    for partition in range(2):
        found = partition_anomalies(crashed.source, crashed.copies[death], partition)
        assert found == [], partition


@pytest.mark.gate("a process per failpoint; the simulation has them all")
def test_each_failpoint_crashed_before_or_after_its_step(crashed):
    ends = {death: sum(found) for death, found in crashed.ends.items()}

    for point in ("plan.positions", "plan.dispatch", "fetch.answered", "produce.prepared"):
        assert ends[point, 1] == 0, point
    for point in ("produce.answered", "commit.received", "commit.done"):
        assert ends[point, 1] > 0, point
    for point in ("produce.prepared", "produce.answered"):
        assert 0 < ends[point, 4] < 2 * RECORDS, point


# At random moments


def both_ways(brokers, topic):
    """A topic from each broker to the other; two copies for one mirror to write."""
    one, other = brokers
    pairs = [(one, other, f"{topic}-there"), (other, one, f"{topic}-back")]
    for source, _, name in pairs:
        source.create_topic(name, partitions=2)
    mirrors = [
        mirror_to_cluster(name, source.bootstrap, destination.bootstrap, name=name)
        for source, destination, name in pairs
    ]
    return pairs, mirrors


@contextlib.contextmanager
def writing_all(pairs, *, seed):
    with contextlib.ExitStack() as stack:
        for number, (source, _, name) in enumerate(pairs):
            stack.enter_context(writing(source.bootstrap, name, partitions=2, seed=seed + number))
        yield


def all_anomalies(pairs):
    return {
        name: found
        for source, destination, name in pairs
        if (found := anomalies(source.bootstrap, name, destination.bootstrap, partitions=range(2)))
    }


def ends_of(pairs, clusters=None):
    """The ends of all copies; of all topics at other clusters, if these are given."""
    clusters = clusters or [destination.bootstrap for _, destination, _ in pairs]
    return [
        end_of(bootstrap, name, partition)
        for bootstrap, (_, _, name) in zip(clusters, pairs, strict=True)
        for partition in range(2)
    ]


def wait_for_progress(pairs, run):
    """Wait until every partition of every copy has moved on."""
    before = ends_of(pairs)
    wait_until(
        lambda: (
            all(now > then for now, then in zip(ends_of(pairs), before, strict=True))
            or not run.alive
        ),
        what=lambda: f"{ends_of(pairs)} to pass {before}:\n{run.text}",
    )
    assert run.alive, run.text


@pytest.mark.thinned
def test_kills_at_random_moments_leave_exact_copies(brokers, tmp_path):
    seed = int(os.environ.get("LOGMIRROR_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"LOGMIRROR_TEST_SEED={seed}")  # noqa: T201  # pytest shows it when the test fails
    chooser = random.Random(seed)
    pairs, mirrors = both_ways(brokers, "kills")
    copy(*mirrors)  # makes the topics
    config = write_config(tmp_path / "config.json", *mirrors)

    with writing_all(pairs, seed=seed % 1000), contextlib.ExitStack() as stack:
        for number in range(KILLS):
            kind = Run if number % KILLS in ON_SPARK else InlineRun
            run = stack.enter_context(kind(config, folder=tmp_path))
            if chooser.random() < 0.8:
                wait_for_progress(pairs, run)
            time.sleep(chooser.uniform(0, 1.5))
            assert run.alive, run.text
            if ON_SPARK.get(number) == "all processes":
                run.signal_all(signal.SIGKILL)
            run.kill()
        written = [source.bootstrap for source, _, _ in pairs]
        wait_until(  # few kills on a fast machine leave the writer little time
            lambda: min(ends_of(pairs, written)) > 100, what=lambda: f"{ends_of(pairs, written)}"
        )
    copy(*mirrors)

    assert all_anomalies(pairs) == {}
    assert min(ends_of(pairs)) > 100


# The brokers


@pytest.mark.gate("restarts of two brokers")
def test_kills_of_the_brokers_at_both_ends_leave_exact_copies(brokers, tmp_path):
    """Each is source of one copy and destination of the other, and dies under both."""
    pairs, mirrors = both_ways(brokers, "broker-kills")
    copy(*mirrors)
    config = write_config(tmp_path / "config.json", *mirrors)

    with writing_all(pairs, seed=5), InlineRun(config, folder=tmp_path) as run:
        for broker in brokers if KILLS <= 10 else brokers * 3:
            wait_for_progress(pairs, run)
            broker.kill()
            time.sleep(0.5)
            broker.start()
        wait_for_progress(pairs, run)
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text
    copy(*mirrors)

    assert all_anomalies(pairs) == {}
    assert min(ends_of(pairs)) > 100
