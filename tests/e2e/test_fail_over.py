"""Goal: a service that is killed continues in the replica at its next unread record, or before.

Method: services of stock clients read a topic with transactions in a group while a mirror runs, and
are killed. More records are written, the cluster is stopped, and the service starts at the replica.
What it processed in both lives is compared with the records of the topic, read by librdkafka.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit.judges.services import JavaByClient, JavaConsumer, Librdkafka, Streams
from kit.runs.fail_over import Lives, live_twice, unread, world_of, write
from kit.runs.replica_groups import PARTITIONS
from kit.servers.embedded import EmbeddedBroker
from kit.tiers import all_but

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.timeout(400)

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
