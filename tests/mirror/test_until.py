"""`until`: a copy ends before an offset or a time, and its run ends.

Method: the real driver loop over a scripted source whose records have a batch each.
"""

import pytest

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, record, service
from logmirror.cluster.client import NO_OFFSET
from logmirror.errors import EndsEarlierError, PositionError, UnavailableError, UsageError
from logmirror.mirror.until import Until
from logmirror.testing import MemoryStore
from logmirror.wire.records import encode_reference

SPEC = archive_spec(max_offsets=50)


def log_of(*times_ms, first=0):
    """A partition with a record at each of these times."""
    return Log(
        [
            encode_reference([record(offset, timestamp_ms=at)])
            for offset, at in enumerate(times_ms, first)
        ]
    )


def run(client, store, until, spec=SPEC, **options):
    """Run the service, which must return by itself."""
    clock = SteppingClock()

    def on_sleep():
        assert clock.ms < 600_000, "it never ends"

    clock.on_sleep = on_sleep
    with service(client, store, spec=spec, clock=clock, until=until, **options) as (made, _):
        made.run()


def ends(store):
    """The last offset of each partition."""
    found = {}
    for name in sorted(n for n in store.objects if not n.startswith(".")):
        _, partition, file = name.split("/")
        found[int(partition)] = int(file.split(".")[0].split("-")[1])
    return found


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        (Until(offset=3), {0: 2, 1: 1}),
        (Until(offset=0), {}),
        (Until(time_ms=40), {0: 2, 1: 1}),  # offset 3 has 50, and offset 4 is earlier again
        (Until(time_ms=10), {1: 1}),
        (Until(time_ms=99), {0: 5, 1: 1}),
    ],
)
def test_each_partition_ends_before_the_offset_or_the_first_record_since_the_time(until, expected):
    store = MemoryStore()
    run(ScriptedClient([log_of(10, 20, 30, 50, 25, 60), log_of(1, 2)]), store, until)
    assert ends(store) == expected


def test_a_second_run_adds_nothing_and_a_lower_limit_is_an_error():
    store, client = MemoryStore(), ScriptedClient([log_of(10, 20, 30, 50)])
    run(client, store, Until(time_ms=30))
    before = dict(store.objects)
    run(client, store, Until(time_ms=30))
    assert store.objects == before
    with pytest.raises(PositionError, match="beyond `until`") as caught:
        run(client, store, Until(time_ms=20))
    assert caught.value.facts["reason"] == "BeyondUntil"
    assert (caught.value.facts["position"], caught.value.facts["until_offset"]) == (2, 1)
    assert store.objects == before
    run(client, store, Until(offset=3))
    assert ends(store) == {0: 2}


class Inexact(ScriptedClient):
    """A source that finds no record by its time, as one may that reads few of many objects."""

    def list_offsets(self, partitions, timestamp, **more):
        found = super().list_offsets(partitions, timestamp, **more)
        return found if timestamp < 0 else dict.fromkeys(found, NO_OFFSET)


@pytest.mark.parametrize(
    ("time_ms", "expected"), [(40, {0: 2}), (10, {}), (60, {0: 4}), (61, {0: 5})]
)
@pytest.mark.parametrize("compaction", [None, "log"])
def test_a_record_that_the_lookup_has_not_found_is_not_copied(time_ms, expected, compaction):
    spec = archive_spec(max_offsets=50, compaction=compaction)
    store, client = MemoryStore(), Inexact([log_of(10, 20, 30, 50, 25, 60)])
    for _ in range(2):
        run(client, store, Until(time_ms=time_ms), spec)
        assert ends(store) == expected


def test_a_record_that_arrives_after_the_lookup_is_not_copied():
    class Growing(ScriptedClient):
        def list_offsets(self, partitions, at, **options):
            found = super().list_offsets(partitions, at, **options)
            if at >= 0:
                (log,) = self.logs.values()
                log.batches += log_of(99, first=log.end).batches
            return found

    store = MemoryStore()
    run(Growing([log_of(10, 20)]), store, Until(time_ms=99))
    assert ends(store) == {0: 1}


@pytest.mark.parametrize("failing", ["list_offsets", "fetch"])
def test_a_lookup_that_fails_stops_its_mirror(failing):
    class Denied(ScriptedClient):
        def list_offsets(self, partitions, at, **options):
            if at >= 0 and failing == "list_offsets":
                raise UsageError("denied")
            return super().list_offsets(partitions, at, **options)

        def fetch(self, *_, **__):
            raise UsageError("denied")

    store = MemoryStore()
    with pytest.raises(UsageError, match="denied"):
        run(Denied([log_of(10, 20)]), store, Until(time_ms=20))
    assert ends(store) == {}


def test_a_failed_lookup_concerns_its_partition_alone_and_the_run_ends():
    """The others are copied at once, without the retries of a joint request."""

    class Damaged(ScriptedClient):
        def list_offsets(self, partitions, at, **options):
            if at >= 0 and any(each.partition == 1 for each in partitions):
                raise UnavailableError("damaged object")
            return super().list_offsets(partitions, at, **options)

    store, client = MemoryStore(), Damaged([log_of(10, 20), log_of(10, 20), log_of(10, 20, 30)])
    with pytest.raises(UnavailableError, match="damaged object"):
        run(client, store, Until(time_ms=20))
    assert ends(store) == {0: 0, 2: 0}


@pytest.mark.parametrize("offset", [0, 2, 5])
def test_a_limit_below_the_log_start_copies_nothing_of_that_partition(offset):
    logs = [log_of(*range(9)), log_of(*range(4), first=5)]
    logs[1].log_start = 5
    store, client = MemoryStore(), ScriptedClient(logs)
    for _ in range(2):
        run(client, store, Until(offset=offset), chain_start="earliest")
        assert ends(store) == ({0: offset - 1} if offset else {})
    run(client, store, Until(offset=7), chain_start="earliest")
    assert ends(store) == {0: 6, 1: 6}
    with pytest.raises(PositionError, match="beyond `until`"):
        run(client, store, Until(offset=6), chain_start="earliest")


def test_a_claim_of_an_earlier_run_beyond_such_a_record_stops_the_copy():
    """A claim fixes the range of the next object, so the copy cannot end before the record."""
    log = log_of(10, 20, 30, 50, 25, 60)
    store, client = MemoryStore(), Inexact([log])
    run(client, store, Until(offset=6))
    (name,) = [name for name in store.objects if not name.startswith(".")]
    del store.objects[name]  # a crash between the claim and its object
    with pytest.raises(EndsEarlierError) as caught:
        run(client, store, Until(time_ms=40))
    assert caught.value.offset == 3
    assert not ends(store)
