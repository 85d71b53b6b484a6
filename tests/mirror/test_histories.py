"""A source with a second history: copied records are gone, others are at their offsets.

Method: a scripted source loses its last batches and receives others, so that its log is longer than
the position. Archives in each format must stop before a record of the second history, in a running
process and after a restart, by leader epochs or, where the source has none, by the last record.
"""

from dataclasses import replace

import pytest

from kit.fakes.scripted import (
    TOPIC_ID,
    Log,
    ScriptedClient,
    SteppingClock,
    archive_spec,
    batches,
    record,
    service,
)
from logmirror.archive.claims import Claim, latest_claim
from logmirror.errors import CorruptionError, PositionError
from logmirror.mirror.flow_state import FlowState
from logmirror.mirror.flow_table import FlowTable, LoopContext
from logmirror.mirror.histories import EpochChanges, compared
from logmirror.mirror.ports import FlowId, KafkaSpec, SourceView
from logmirror.mirror.source_views import MirrorSpec
from logmirror.mirror.stopped import StoppedMirrors
from logmirror.model import EpochEnd
from logmirror.testing import MemoryStore
from logmirror.wire.batch_header import parse_header
from logmirror.wire.records import encode_reference

FORMATS = ["native", "parquet", "ndjson", "snapshots"]
FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)


def spec_of(form, **more):
    if form == "snapshots":
        return archive_spec(format="parquet", compaction="log", **more)
    return archive_spec(format=form, **more)


def other(first, stop, *, epoch):
    """One batch of the second history."""
    return encode_reference(
        [record(n, key=b"B%d" % n, value=b"second") for n in range(first, stop)],
        leader_epoch=epoch,
    )


def first_history(epoch):
    """Offsets 0-5 and 6-9; the second batch is lost later."""
    return [
        *batches(0, 6, size=3, leader_epoch=epoch),
        encode_reference([record(n) for n in range(6, 10)], leader_epoch=epoch),
    ]


def regrow(log, *, straddles, epoch):
    """Lose offsets 6-9 and receive 6-13; `straddles`: in one batch over the position."""
    new = [(6, 14)] if straddles else [(6, 10), (10, 14)]
    log.batches[-1:] = [other(*bounds, epoch=epoch) for bounds in new]
    log.leader_epoch = epoch


def names(store):
    return [name for name in store.objects if not name.startswith(".")]


def until_now(log, store, form, **more):
    with service(
        ScriptedClient([log], topic_id=more.pop("topic_id", None)),
        store,
        spec=spec_of(form),
        clock=SteppingClock(),
        **more,
    ) as (made, _):
        made.run(until_now=True)


def stopped(log, store, form):
    before = dict(store.objects)
    with pytest.raises(PositionError) as caught:
        until_now(log, store, form)
    assert caught.value.facts["reason"] == "SourceWentBackwards"
    assert store.objects == before
    return caught.value.facts


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("straddles", [False, True])
def test_epochs_show_it_after_a_restart(form, straddles):
    log, store = Log(first_history(3), leader_epoch=3), MemoryStore()
    until_now(log, store, form)
    regrow(log, straddles=straddles, epoch=4)

    facts = stopped(log, store, form)

    assert (facts["expected"], facts["got"], facts["diverges_at"]) == (10, 6, 6)
    assert (facts["expected_epoch"], facts["found_epoch"]) == (3, 3)
    assert (facts["topic"], facts["partition"]) == ("t", 0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("straddles", [False, True])
@pytest.mark.parametrize("epoch", [0, -1])
def test_the_last_record_shows_it_where_the_source_has_no_epochs(form, straddles, epoch):
    log, store = Log(first_history(epoch), leader_epoch=epoch), MemoryStore()
    until_now(log, store, form)
    regrow(log, straddles=straddles, epoch=epoch)

    facts = stopped(log, store, form)

    assert facts["offset"] == 9
    assert "second" in str(facts["expected"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("straddles", [False, True])
@pytest.mark.parametrize("when", ["discovered", "before the next discovery"])
def test_epochs_show_it_in_a_running_process(form, straddles, when):
    log, store, clock = Log(first_history(3), leader_epoch=3), MemoryStore(), SteppingClock()
    client = ScriptedClient([log], topic_id=None)
    if when != "discovered":  # the metadata is older than the log, as in the first five seconds
        topic = client.topic("t")
        client.topic = lambda _name: topic

    def on_sleep():
        if clock.ms > 2000 and log.leader_epoch == 3:
            assert len(names(store)) == 1
            regrow(log, straddles=straddles, epoch=4)

    with service(client, store, spec=spec_of(form), clock=clock) as (made, _):
        clock.on_sleep = on_sleep
        with pytest.raises(PositionError) as caught:
            made.run()
    facts = caught.value.facts
    assert (facts["reason"], facts["diverges_at"]) == ("SourceWentBackwards", 6)
    assert [name.rpartition("/")[2][21:41] for name in names(store)] == [f"{9:020}"]


def test_a_log_that_ends_below_the_position_shows_where_it_diverges():
    log, store = Log(first_history(3), leader_epoch=3), MemoryStore()
    until_now(log, store, "parquet")
    log.batches[-1:] = [other(6, 8, epoch=4)]
    log.leader_epoch = 4

    facts = stopped(log, store, "parquet")

    assert (facts["position"], facts["last_stable_offset"], facts["diverges_at"]) == (10, 8, 6)


@pytest.mark.parametrize("form", FORMATS)
def test_a_leader_that_lost_nothing_is_followed(form):
    log, store, clock = Log(first_history(3), leader_epoch=3), MemoryStore(), SteppingClock()

    def on_sleep():
        if clock.ms > 2000 and log.leader_epoch == 3:
            log.leader_epoch = 4
        if clock.ms > 8000 and log.end == 10:
            log.batches.append(other(10, 14, epoch=4))
        if clock.ms > 12_000:
            made.stop()

    client = ScriptedClient([log], topic_id=None)
    with service(client, store, spec=spec_of(form), clock=clock) as (made, _):
        clock.on_sleep = on_sleep
        made.run()
    until_now(log, store, form)

    assert [name.rpartition("/")[2][21:41] for name in names(store)] == [f"{9:020}", f"{13:020}"]
    assert latest_claim(store, "d", 0).leader_epoch == 4


def test_a_longer_log_of_an_older_leader_is_another_history():
    """Epoch 3 was copied up to 5, epoch 4 from 6 on. The new leader has epoch 3 up to 20."""
    log, store = Log(first_history(3), leader_epoch=4), MemoryStore()
    log.batches[-1] = encode_reference([record(n) for n in range(6, 10)], leader_epoch=4)
    until_now(log, store, "parquet")
    log.batches[-1:] = [other(6, 21, epoch=3), other(21, 25, epoch=5)]
    log.leader_epoch = 5

    facts = stopped(log, store, "parquet")

    assert (facts["expected_epoch"], facts["found_epoch"], facts["got"]) == (4, 3, 21)


@pytest.mark.parametrize("changes", [{}, {"last": True}], ids=["the same", "another"])
def test_records_decide_where_compaction_removed_the_epoch(changes):
    """A replica that was built after the cleaner ran does not know an epoch without batches."""
    log, store = Log(first_history(3), leader_epoch=4), MemoryStore()
    log.batches[1] = encode_reference([record(n) for n in range(3, 6)], leader_epoch=4)
    log.batches[2] = encode_reference([record(n) for n in range(6, 10)], leader_epoch=4)
    compacted = ScriptedClient([log], configs={"cleanup.policy": "compact"}, topic_id=None)

    def run():
        spec = archive_spec(format="parquet")
        with service(compacted, store, spec=spec, clock=SteppingClock()) as (made, _):
            made.run(until_now=True)

    run()
    kept = other(9, 10, epoch=5) if changes else None
    log.batches[1:] = [*filter(None, [kept]), other(10, 14, epoch=5)]
    log.leader_epoch = 5
    if changes:
        with pytest.raises(PositionError):
            run()
        assert len(names(store)) == 1
    else:
        run()
        assert len(names(store)) == 2


@pytest.mark.parametrize("form", ["native", "parquet", "ndjson"])
def test_claims_have_the_epoch_of_the_last_batch_of_their_object(form):
    log = Log([*batches(0, 10, leader_epoch=2), *batches(10, 20, leader_epoch=7)], leader_epoch=7)
    store = MemoryStore()
    spec = archive_spec(format=form, max_offsets=8)
    with service(ScriptedClient([log]), store, spec=spec, clock=SteppingClock()) as (made, _):
        made.run(until_now=True)
    claims = [
        Claim.from_bytes(data, name=name)
        for name, data in store.objects.items()
        if name.startswith(".logmirror/claims/")
    ]
    assert len(claims) > 1
    for claim in claims:
        (holder,) = [
            header
            for header in (parse_header(batch, 0) for batch in log.batches)
            if header.base_offset <= claim.covered.last <= header.last_offset
        ]
        assert claim.leader_epoch == holder.leader_epoch


@pytest.mark.parametrize("form", FORMATS)
def test_an_archive_of_an_older_version_is_compared_and_continued(form):
    log, store = Log(first_history(3), leader_epoch=3), MemoryStore()
    until_now(log, store, form)
    (name,) = [name for name in store.objects if name.startswith(".logmirror/claims/")]
    claim = Claim.from_bytes(store.objects[name], name=name)
    store.objects[name] = replace(claim, leader_epoch=None).to_bytes()
    log.batches.append(other(10, 14, epoch=3))
    until_now(log, store, form)
    assert len(names(store)) == 2

    store.objects = {n: data for n, data in store.objects.items() if f"{10:020}" not in n}
    log.batches[2:] = [other(6, 14, epoch=3)]
    stopped(log, store, form)


@pytest.mark.parametrize("form", ["native", "ndjson"])
def test_a_changed_object_is_not_blamed_on_the_source(form):
    log, store = Log(first_history(0)), MemoryStore()
    until_now(log, store, form)
    (name,) = names(store)
    whole = store.objects[name]
    if form == "native":
        at = whole.rindex(b"value-9")
        store.objects[name] = whole[:at] + b"V" + whole[at + 1 :]
    else:
        at = whole.rindex(b'"value":"') + len(b'"value":"')
        store.objects[name] = whole[:at] + b"X" + whole[at + 1 :]
    log.batches.append(other(10, 14, epoch=0))
    with pytest.raises(CorruptionError) as caught:
        until_now(log, store, form)
    assert caught.value.facts["name"] in name


def view_of(leader_epoch, end):
    return SourceView(
        topic_id=None,
        log_start=0,
        last_stable_offset=99,
        leader_epoch=leader_epoch,
        epoch_end=end,
    )


@pytest.mark.parametrize(
    ("epoch", "leader_epoch", "end", "outcome"),
    [
        (-1, 5, None, (-1, False)),
        (3, -1, None, (-1, False)),  # the source has no epochs
        (3, 2, None, (-1, False)),  # it was restored from a backup, with its metadata
        (0, 0, EpochEnd(0, 10), (0, False)),  # a broker without epochs responds the same
        (0, 1, EpochEnd(0, 10), (0, True)),
        (3, 3, EpochEnd(3, 12), (3, True)),
        (3, 5, EpochEnd(3, 10), (3, True)),
        (3, 5, EpochEnd(3, 9), None),
        (3, 5, EpochEnd(2, 12), None),
    ],
)
def test_what_an_epoch_proves(epoch, leader_epoch, end, outcome):
    if outcome is None:
        with pytest.raises(PositionError):
            compared(FLOW, 10, view_of(leader_epoch, end), epoch, compacted=False)
    else:
        found = compared(FLOW, 10, view_of(leader_epoch, end), epoch, compacted=False)
        assert found == outcome


@pytest.mark.parametrize(
    ("epoch", "to_cluster", "checked"),
    [(3, False, True), (-1, False, False), (3, True, False), (-1, True, False)],
)
def test_an_election_repeats_the_comparison_that_epochs_do_not_replace(epoch, to_cluster, checked):
    log = Log(batches(0, 10, leader_epoch=3), leader_epoch=4)
    client = ScriptedClient([log])
    spec = KafkaSpec(cluster=None, topic="t") if to_cluster else archive_spec()
    state = FlowState(
        flow=FLOW,
        destination=spec,
        topic_id=TOPIC_ID,
        compacted=False,
        position=10,
        leader_epoch=epoch,
        source_epoch=3,
    )
    mirror = MirrorSpec(
        name="m",
        source="source",
        topic="t",
        partitions=None,
        destinations=(("d", spec),),
        chain_start=None,
    )
    context = LoopContext(
        client=lambda _: client,
        brief_client=lambda _: client,
        destinations={},
        observer=None,
        clock=SteppingClock(),
    )
    table = FlowTable([mirror], context, StoppedMirrors("exit", ["m"]))
    table.add(mirror, state)
    changes = EpochChanges(context, table)

    changes.compare(mirror, client.topic("t"))

    assert (state.tail_checked, state.source_epoch) == (checked, 4)
    state.tail_checked = True
    changes.compare(mirror, client.topic("t"))
    assert state.tail_checked
