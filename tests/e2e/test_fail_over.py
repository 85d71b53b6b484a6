"""Goal: a service that is killed continues in the replica at its next unread record, or before.

Method: services of stock clients read a topic with transactions in a group while a mirror runs, and
are killed. More records are written, the cluster is stopped, and the service starts at the replica.
What it processed in both lives is compared with the records of the topic, read by librdkafka.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit.judges.copies import copy, forget_connections
from kit.judges.gaps import COMPACTED, log_bounds, write_duplicated_keys
from kit.judges.services import JavaByClient, JavaConsumer, Librdkafka, Streams
from kit.runs.cleaning import clean, stop_cleaning
from kit.runs.commands import logmirror
from kit.runs.fail_over import Lives, live_twice, unread, world_of, write
from kit.runs.replica_groups import PARTITIONS, commit, committed
from kit.servers.embedded import EmbeddedBroker
from kit.tiers import all_but

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("e2e-groups")]

SERVICES = {
    "librdkafka": Librdkafka,
    "java": JavaConsumer,
    "java-by-client": JavaByClient,
    "streams": Streams,
}
CASES = [(offsets, name) for offsets in ("preserve", "translate") for name in SERVICES]
WHY = "each client, pair and kind of offsets is in `make test` once"


def check(lives: Lives, *, offsets: str, is_exact: bool) -> None:
    """Compare both lives with the records.

    Args:
        lives: What the service processed.
        offsets: `preserve` or `translate`.
        is_exact: Whether it commits with what it has processed, in one transaction.
    """
    for number in range(PARTITIONS):
        rows, first, second = (one[number] for one in (lives.source, lives.first, lives.second))
        before = len([row for row in rows if row.offset < lives.committed[number]])
        assert first == [row.value for row in rows[: len(first)]]
        assert before <= len(first) < len(rows)
        assert second == unread(lives.replica[number], lives.starts[number])
        assert second[-len(rows) + before :] == unread(rows, lives.committed[number])
        if is_exact:
            assert len(first) == before
        if offsets == "preserve":
            assert second == unread(rows, lives.committed[number])
            assert [one for one in first if one in second] == first[before:]


def fail_over(
    case: tuple[str, str], topic: str, folder: Path, source: Any, destination: str
) -> None:
    """Let a service live twice, and check it."""
    offsets, name = case
    by_client = name == "java-by-client"
    servers = source.bootstrap, destination
    world = world_of(folder, topic, offsets, *servers, **{"sync-group-offsets": not by_client})
    write(world.source, topic, seed=0)

    lives = live_twice(world, source, SERVICES[name], folder)

    check(lives, offsets=offsets, is_exact=name == "streams")


@pytest.mark.parametrize(
    "case",
    all_but(CASES, ("preserve", "librdkafka"), ("translate", "java-by-client"), reason=WHY),
    ids="-".join,
)
def test_from_apache_kafka_to_the_embedded_broker(case, kafka_431, topic_name, tmp_path):
    with EmbeddedBroker(tmp_path / "broker") as embedded:
        fail_over(case, topic_name, tmp_path, kafka_431, embedded.bootstrap)


@pytest.mark.parametrize(
    "case",
    all_but(CASES, ("preserve", "java"), ("translate", "streams"), reason=WHY),
    ids="-".join,
)
def test_between_releases_of_apache_kafka(case, kafka_392, kafka_431, topic_name, tmp_path):
    fail_over(case, topic_name, tmp_path, kafka_392, kafka_431.bootstrap)


@pytest.mark.parametrize("offsets", ["preserve", "translate"])
def test_a_group_of_a_compacted_topic_skips_no_record_that_is_left(
    offsets, kafka_431, topic_name, tmp_path
):
    """Groups at every tenth offset: most of these offsets have no record any more."""
    with EmbeddedBroker(tmp_path / "broker") as embedded:
        servers = kafka_431.bootstrap, embedded.bootstrap
        world = world_of(tmp_path, topic_name, offsets, *servers, config=COMPACTED)
        for number in range(PARTITIONS):
            write_duplicated_keys(world.source, topic_name, number, seed=number)
        clean(kafka_431, topic_name, PARTITIONS)
        stop_cleaning(kafka_431, topic_name)
        source = [world.rows(world.source, number) for number in range(PARTITIONS)]
        ends = [log_bounds(world.source, topic_name, number)[1] for number in range(PARTITIONS)]
        places = {f"{topic_name}-{at}": at for at in (*range(0, min(ends), 10), min(ends))}
        left = {row.offset for row in source[0]}
        assert len(left.intersection(places.values())) < len(places) / 2
        for group, at in places.items():
            commit(world, world.source, group, at, at)
        copy(world.mirror)
        forget_connections()

        done = logmirror("run", "--only", "groups", "--until-now", "-c", world.config)

        assert done.returncode == 0, done.stderr
        replica = [world.rows(world.destination, number) for number in range(PARTITIONS)]
        for group, at in places.items():
            for number, start in enumerate(committed(world, world.destination, group)):
                rest, expected = unread(replica[number], start), unread(source[number], at)
                assert rest[-len(expected) :] == expected, (group, number, start)
                assert offsets == "translate" or rest == expected, (group, number, start)
