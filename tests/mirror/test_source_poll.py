"""A partition of the source that does not respond holds up the others once at most.

At a start, and when partitions appear, it holds up none. Method: the real driver loop over a
scripted source. A joint request with such a partition takes the minute that its retries last, on a
clock that moves only when something waits.
"""

import pytest

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, batches, service
from logmirror.cluster.client import LATEST
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import UnavailableError
from logmirror.mirror.flow_table import ATTEMPTS_UNTIL_NOW
from logmirror.model import TopicPartition
from logmirror.testing import MemoryStore

SPEC = archive_spec(max_offsets=5, max_time_ms=1000)
RETRIES_MS = 60_000
NO_LEADER = UnavailableError("no leader")


class Cluster(ScriptedClient):
    """A source of which some partitions fail, each with its error.

    They do so from the first poll on, which is not the first request: opening reads the ends, too.
    """

    def __init__(self, count, clock):
        super().__init__([Log(batches(0, 10)) for _ in range(count)])
        self.clock, self.failing, self.ends_read, self.joint = clock, {}, 0, []

    def error_of(self, partition, at):
        return (
            self.failing.get(partition.partition) if at == LATEST and self.ends_read > 1 else None
        )

    def list_offsets(self, partitions, at, **options):
        self.ends_read += at == LATEST
        for error in filter(None, (self.error_of(each, at) for each in partitions)):
            self.joint.append({each.partition for each in partitions})
            self.clock.sleep_ms(RETRIES_MS if isinstance(error, UnavailableError) else 0)
            raise error
        return super().list_offsets(partitions, at, **options)

    def try_list_offsets(self, partitions, at):
        found = {each: self.error_of(each, at) for each in partitions}
        well = [each for each, error in found.items() if error is None]
        return found | super().list_offsets(well, at)

    def grow(self):
        for log in self.logs.values():
            log.batches += batches(log.end, log.end + 5)


class Lost(Cluster):
    """A source of which some partitions fail from the first request on."""

    def error_of(self, partition, at):
        del at
        return self.failing.get(partition.partition)


def end(store, partition):
    """One past the last offset that the archive has."""
    names = [n for n in store.objects if n.startswith(f"d/{partition}/")]
    return max((int(n.split("-")[-1].split(".")[0]) + 1 for n in names), default=0)


def test_partitions_continue_beside_one_without_a_leader_after_one_joint_wait():
    clock, store = SteppingClock(), MemoryStore()
    client = Cluster(4, clock)
    lost_ms, back_ms, over_ms = 2_000, 400_000, 500_000
    behind = []
    with service(client, store, spec=SPEC, clock=clock) as (made, _):

        def on_sleep():
            client.failing = {3: NO_LEADER} if lost_ms < clock.ms < back_ms else {}
            if clock.ms // 5_000 > len(behind):
                behind.append((clock.ms, client.logs.copy(), end(store, 0), end(store, 3)))
                client.grow()
            if clock.ms > over_ms:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
        (partition,) = [each for each in client.logs if each.partition == 3]
        assert end(store, 3) == client.logs[partition].end == end(store, 0)
    assert client.joint == [{0, 1, 2, 3}], "one joint wait, and no other"
    during = [row for row in behind if lost_ms + 2 * RETRIES_MS < row[0] < back_ms]
    assert len(during) > 40
    assert len({row[2] for row in during}) == len(during), "the others grow every 5 s"
    assert {row[3] for row in during} == {10}


def test_a_run_up_to_now_ends_although_a_partition_has_not_responded_once():
    """It copies the others at once, and gives up on that one. It does not count as copied."""
    clock, store = SteppingClock(), MemoryStore()
    client = Cluster(3, clock)
    client.failing = {1: NO_LEADER}

    def on_sleep():
        assert clock.ms < 2 * ATTEMPTS_UNTIL_NOW * RETRIES_MS, "it never ends"
        if clock.ms > RETRIES_MS + 5_000:
            assert [end(store, n) for n in range(3)] == [10, 0, 10]

    clock.on_sleep = on_sleep
    running = service(client, store, spec=SPEC, clock=clock)
    with running as (made, _), pytest.raises(UnavailableError, match="no leader"):
        made.run(until_now=True)
    assert client.joint == [{0, 1, 2}] + [{1}] * (len(client.joint) - 1)
    assert len(client.joint) <= ATTEMPTS_UNTIL_NOW


def test_a_partition_that_is_missing_in_one_attempt_is_looked_up_again():
    """Metadata of a new broker may lack it. One attempt does not wait for it."""
    tried = []

    class Late(Cluster):
        def try_list_offsets(self, partitions, at):
            found = super().try_list_offsets(partitions, at)
            if self.ends_read > 1:  # a poll
                tried.append(found)
            missing = NotFoundError("the topic has no such partition")
            return {p: missing if p.partition == 0 and len(tried) == 1 else found[p] for p in found}

    clock, store = SteppingClock(), MemoryStore()
    client = Late(3, clock)
    client.failing = {1: NO_LEADER}
    with service(client, store, spec=SPEC, clock=clock) as (made, _):
        clock.on_sleep = lambda: made.stop() if clock.ms > 2 * RETRIES_MS else None
        made.run()
    assert len(tried) > 1
    assert [end(store, n) for n in range(3)] == [10, 0, 10]


def test_a_start_copies_the_partitions_that_respond_and_the_others_when_they_do():
    clock, store = SteppingClock(), MemoryStore()
    client, back_ms = Lost(3, clock), 200_000
    client.failing = {1: NO_LEADER}
    with service(client, store, spec=SPEC, clock=clock) as (made, _):

        def on_sleep():
            if RETRIES_MS / 2 < clock.ms < back_ms:
                assert [end(store, n) for n in range(3)] == [10, 0, 10]
            if clock.ms > back_ms:
                client.failing = {}
            if clock.ms > back_ms + 2 * RETRIES_MS:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
    assert [end(store, n) for n in range(3)] == [10, 10, 10]
    assert client.joint == []


def test_new_partitions_without_a_leader_hold_up_none():
    clock, store = SteppingClock(), MemoryStore()
    client, new_ms, back_ms = Lost(1, clock), 20_000, 200_000
    grown = []
    with service(client, store, spec=SPEC, clock=clock) as (made, _):

        def on_sleep():
            if clock.ms > new_ms and len(client.logs) == 1:
                client.logs |= {TopicPartition("t", n): Log(batches(0, 10)) for n in (1, 2)}
            client.failing = {1: NO_LEADER, 2: NO_LEADER} if clock.ms < back_ms else {}
            if clock.ms // 5_000 > len(grown):
                grown.append(end(store, 0))
                client.grow()
            if clock.ms > back_ms + 2 * RETRIES_MS:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
        assert [end(store, n) for n in range(3)] == [log.end for log in client.logs.values()]
    assert client.joint == []
    assert len(set(grown)) == len(grown), "it grows every 5 s"


def test_a_start_at_which_no_partition_responds_waits_for_them_before_it_fails():
    clock, store = SteppingClock(), MemoryStore()
    client = Lost(2, clock)
    client.failing = dict.fromkeys(range(2), NO_LEADER)
    running = service(client, store, spec=SPEC, clock=clock)
    with running as (made, _), pytest.raises(UnavailableError, match="no leader"):
        made.run()
    assert client.joint == [{0, 1}]


def test_a_run_up_to_now_waits_for_all_partitions_at_its_start():
    clock, store = SteppingClock(), MemoryStore()
    client = Lost(3, clock)
    client.failing = {1: NO_LEADER}
    running = service(client, store, spec=SPEC, clock=clock)
    with running as (made, _), pytest.raises(UnavailableError, match="no leader"):
        made.run(until_now=True)
    assert client.joint == [{0, 1, 2}]
