"""Goal: after a failover, the old topic is continued from its replica; no record is copied twice.

Method: a topic with transactions is copied from A to B with the source's offsets. Clients write to
B, and the topic is copied back. Records at both, groups and refusals are read by librdkafka.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.copies import anomalies, copy, copying, forget_connections
from kit.judges.gaps import log_bounds
from kit.runs.cleaning import set_config
from kit.runs.commands import logmirror, wait_until
from kit.runs.fail_over import write
from kit.runs.inline_run import InlineRun, config_text, mirror_to_cluster, run_now
from kit.runs.replica_groups import PARTITIONS, World, commit, committed
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.cluster.client import ClusterClient
from logmirror.errors import PositionError, UsageError
from logmirror.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("e2e-groups")]
NUMBERS = tuple(range(PARTITIONS))


class Clusters(NamedTuple):
    """A topic at A, and its replica at B that took over."""

    a: str
    b: str
    topic: str
    there: dict[str, Any]
    back: dict[str, Any]

    def back_into(self, topic: str, **more: object) -> dict[str, Any]:
        """The way back into another topic."""
        return mirror_to_cluster(self.topic, self.b, self.a, name="other", topic=topic, **more)

    def committed(self, server: str, group: str) -> list[int]:
        return committed(self._world, server, group)

    def commit(self, server: str, group: str, *offsets: int) -> None:
        commit(self._world, server, group, *offsets)

    @property
    def _world(self) -> Any:
        return World(self.a, self.b, self.topic, None, None, {})  # type: ignore[arg-type]  # it has no files

    def values(self, server: str) -> list[list[bytes | None]]:
        """Return the committed values of each partition."""
        return [
            [row.value for row in rows_by_librdkafka(server, self.topic, partition=number)]
            for number in NUMBERS
        ]

    def bounds(self) -> list[tuple[int, int]]:
        """Return the log of each partition at A."""
        return [log_bounds(self.a, self.topic, number) for number in NUMBERS]


def groups(mirror: Mapping[str, Any], alias: str) -> dict[str, Any]:
    """The mirror with groups whose offsets are committed."""
    own = {"source-alias": alias, "include": [f"{mirror['topic']}.*"], "interval-ms": 300}
    return {**mirror, "groups": {**own, "sync-group-offsets": True}}


@pytest.fixture
def clusters(kafka_431, topic_name, tmp_path) -> Iterator[Clusters]:
    """Apache Kafka is A, the embedded broker is B. The topic was copied to its end."""
    with EmbeddedBroker(tmp_path / "b") as embedded:
        a, b = kafka_431.bootstrap, embedded.bootstrap
        create_topic(a, topic_name, PARTITIONS, {})
        write(a, topic_name, seed=0)
        there = mirror_to_cluster(topic_name, a, b, name=f"{topic_name}-b")
        back = mirror_to_cluster(topic_name, b, a, name=f"{topic_name}-a")
        copy(there)
        yield Clusters(
            a, b, topic_name, groups(there, f"{topic_name}-a"), groups(back, f"{topic_name}-b")
        )
        forget_connections()


def translate(folder: Path, mirror: Mapping[str, Any]) -> None:
    config = folder / "groups.yaml"
    config.write_text(config_text(mirror))
    done = logmirror("run", "--only", "groups", "--until-now", "-c", config)
    assert done.returncode == 0, done.stderr


def test_the_old_topic_is_continued_and_groups_come_back(clusters, tmp_path):
    moved, ahead = (f"{clusters.topic}-{name}" for name in ("moved", "ahead"))
    for group in (moved, ahead):
        clusters.commit(clusters.a, group, 100, 200)
    translate(tmp_path, clusters.there)
    assert clusters.committed(clusters.b, moved) == [100, 200]
    write(clusters.b, clusters.topic, seed=3)
    ends = [log_bounds(clusters.b, clusters.topic, number)[1] for number in NUMBERS]
    clusters.commit(clusters.b, moved, 150, ends[1])
    clusters.commit(clusters.a, ahead, 300, 300)

    copy(clusters.back)
    translate(tmp_path, clusters.back)

    found = anomalies(clusters.b, clusters.topic, clusters.a, partitions=NUMBERS)
    assert found == []
    assert [end for _, end in clusters.bounds()] == ends
    assert clusters.committed(clusters.a, moved) == [150, ends[1]]
    assert clusters.committed(clusters.a, ahead) == [300, 300]
    before = clusters.bounds()
    write(clusters.a, clusters.topic, seed=6)  # A is the source again
    copy(clusters.there)
    assert anomalies(clusters.a, clusters.topic, clusters.b, partitions=NUMBERS) == []
    assert clusters.bounds() > before


@pytest.mark.parametrize(
    ("written", "reason"), [(0, "SourceWentBackwards"), (100, "ContentDiffers")]
)
def test_records_that_were_not_copied_before_the_failover_are_not_written_over(
    clusters, written, reason
):
    lost = [Message(b"key", b"lost %d" % number) for number in range(10)]
    produce(clusters.a, clusters.topic, lost)
    messages = [Message(b"key", b"new %d" % number) for number in range(written)]
    produce(clusters.b, clusters.topic, messages)
    before, values = clusters.bounds(), clusters.values(clusters.a)

    with pytest.raises(PositionError) as raised:
        copy(clusters.back)

    assert raised.value.facts["reason"] == reason
    assert "docs/fail-over.md#fail-back" in str(raised.value.hint)
    assert (clusters.bounds(), clusters.values(clusters.a)) == (before, values)
    for offsets in ("preserve", "translate"):  # what the hint says
        name = f"{clusters.topic}-{offsets}"
        copy(clusters.back_into(name, offsets=offsets))
        for number in NUMBERS:
            there = rows_by_librdkafka(clusters.b, clusters.topic, partition=number)
            here = rows_by_librdkafka(clusters.a, name, partition=number)
            assert [row[1:] for row in here] == [row[1:] for row in there]


def test_an_old_topic_that_is_compacted_is_refused(clusters):
    produce(clusters.b, clusters.topic, [Message(b"key", b"new")])
    set_config(clusters.a, clusters.topic, "cleanup.policy", "compact")
    before = clusters.bounds()

    with pytest.raises(UsageError) as raised:
        copy(clusters.back)

    assert "cleanup.policy" in str(raised.value)
    assert clusters.bounds() == before
    copy(clusters.back_into(f"{clusters.topic}-2"))  # what the page says
    name = f"{clusters.topic}-2"
    assert anomalies(clusters.b, clusters.topic, clusters.a, name, partitions=NUMBERS) == []


def test_a_record_that_returns_while_it_is_waited_for_is_not_written(
    clusters, tmp_path, monkeypatch
):
    """RecordsReturn on brokers: the source had no such record when the mirror read its position."""
    topic, config = clusters.topic, tmp_path / "there.yaml"
    config.write_text(config_text({**clusters.there, "groups": None}))
    back = clusters.back | {"partitions": [0]}  # a single one is waited for by a fetch
    end, fetch, codes = clusters.bounds()[0][1], ClusterClient.fetch, []

    def fetched(client, where, offset, *arguments, **options):
        if (where, offset, codes) == (TopicPartition(topic, 0), end, []):
            codes.append(None)
            produce(clusters.a, topic, [Message(b"key", b"first")])
            codes.append(run_now(config).returncode)
        return fetch(client, where, offset, *arguments, **options)

    monkeypatch.setattr(ClusterClient, "fetch", fetched)
    expected = clusters.values(clusters.a)
    expected[0].append(b"first")

    with pytest.raises(PositionError) as raised, copying(back) as run:
        wait_until(lambda: not run.is_alive(), what=lambda: f"{codes}", timeout_s=90)

    assert codes == [None, 0]
    facts = raised.value.facts
    assert (facts["reason"], facts["expected"], facts["found"]) == ("RecordsReturn", end, end + 1)
    assert [clusters.values(server) for server in (clusters.a, clusters.b)] == [expected] * 2


def test_mirrors_in_both_directions_copy_nothing_twice(clusters, tmp_path):
    topic, servers = clusters.topic, (clusters.a, clusters.b)
    configs = [tmp_path / f"{name}.yaml" for name in ("there", "back")]
    for config, mirror in zip(configs, (clusters.there, clusters.back), strict=True):
        config.write_text(config_text(mirror))
    expected = clusters.values(clusters.a)
    produce(clusters.b, topic, [Message(b"key", b"first")])
    expected[0].append(b"first")
    with contextlib.ExitStack() as stack:
        back = stack.enter_context(InlineRun(configs[1], folder=tmp_path))
        wait_until(
            lambda: clusters.values(clusters.a) == expected, what=lambda: back.text, timeout_s=90
        )
        there = stack.enter_context(InlineRun(configs[0], folder=tmp_path))
        while back.alive:  # each record may reach it before it reads the end of A again
            first = len(expected[0])
            messages = [Message(b"key", b"%d" % number) for number in range(first, first + 20)]
            produce(clusters.a, topic, messages)
            expected[0] += [message.value for message in messages]
            wait_until(
                lambda: clusters.values(clusters.b) == expected,
                what=lambda: f"{there.text}\n{back.text}",
                timeout_s=90,
            )
            assert len(expected[0]) < 2000, back.text
        assert back.wait() == 69
        assert re.search("reason=(RecordsReturn|SourceWentBackwards)", back.text)
        assert there.alive
    assert [clusters.values(server) for server in servers] == [expected, expected]
    assert anomalies(clusters.a, topic, clusters.b, partitions=NUMBERS) == []


def test_heartbeats_show_that_another_process_replicates_in_the_other_direction(clusters, tmp_path):
    found = "another mirror replicates from the destination to the source"
    with contextlib.ExitStack() as stack:
        for name, mirror in (("there", clusters.there), ("back", clusters.back)):
            config = tmp_path / f"{name}.yaml"
            config.write_text(config_text(mirror))
            run = stack.enter_context(InlineRun(config, "--only", "groups", folder=tmp_path))
        line = run.wait_for(found)
        assert f"topic={clusters.topic}-a.heartbeats" in line
        assert run.alive
