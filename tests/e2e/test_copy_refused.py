"""Conditions that stop replication: the error names the cause, no offset gets a wrong record.

Each test brings one side into a state that a replica cannot continue: trimmed, recreated, written
to by others. The mirror runs in this process, so that a test can choose the time.
"""

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import Message, odd_messages, produce, rows_by_aiokafka
from kit.judges.copies import anomalies, copy, copying, forget_connections, wait_for_end
from kit.runs.inline_run import mirror_to_cluster
from logmirror import failpoints
from logmirror.errors import PositionError, UsageError
from logmirror.to_kafka.topic_setup import UnfitTopicError

pytestmark = [pytest.mark.xdist_group("e2e-copy"), pytest.mark.timeout(600)]

FOREIGN = Message(b"foreign", b"not of the source")


FROM_EMBEDDED, FROM_KAFKA = "from the embedded broker", "from Apache Kafka"
both_ways = pytest.mark.parametrize("ends", [FROM_EMBEDDED, FROM_KAFKA], indirect=True)


@pytest.fixture(scope="module")
def brokers(cli_broker, forgetful_kafka):
    yield cli_broker, forgetful_kafka
    forget_connections()


@pytest.fixture
def ends(request, brokers):
    """A source and a destination."""
    return brokers[::-1] if getattr(request, "param", "") == FROM_KAFKA else brokers


@pytest.fixture
def mirror(ends, topic_name):
    """A mirror of a topic of 50 records, nothing copied yet."""
    source, destination = ends
    source.create_topic(topic_name)
    fill(source, topic_name, 50, seed=1)
    return mirror_to_cluster(topic_name, source.bootstrap, destination.bootstrap)


def fill(broker, topic, count, *, seed):
    """Write records of now."""
    messages = [m._replace(timestamp_ms=0) for m in odd_messages(count, seed=seed)]
    produce(broker.bootstrap, topic, messages, config={"batch.num.messages": 10})


def rows(broker, topic):
    return rows_by_aiokafka(broker.bootstrap, topic)


def refused(*mirrors, kind=PositionError):
    """Copy, which must fail; returns the facts of the error."""
    with pytest.raises(kind) as caught:
        copy(*mirrors)
    assert type(caught.value) is kind
    assert caught.value.hint
    return caught.value.facts


@both_ways
def test_a_topic_is_not_copied_onto_itself(ends, topic_name):
    source, _ = ends
    source.create_topic(topic_name)

    other_name = source.bootstrap.replace("127.0.0.1", "127.1")  # which only the system knows
    facts = refused(mirror_to_cluster(topic_name, source.bootstrap, other_name), kind=UsageError)

    assert facts["topic"] == topic_name
    assert facts["cluster_id"]


@both_ways
def test_records_deleted_before_they_were_copied_stop_the_mirror(ends, mirror, topic_name):
    source, destination = ends
    copy(mirror)
    fill(source, topic_name, 50, seed=2)
    before = rows(destination, topic_name)
    trim(source, topic_name, 80)

    facts = refused(mirror)

    assert (facts["reason"], facts["position"], facts["source_start"]) == ("SourceTrimmed", 50, 80)
    assert (facts["topic"], facts["partition"]) == (topic_name, 0)
    assert rows(destination, topic_name) == before


def test_copied_records_may_be_deleted_at_the_source(ends, mirror, topic_name):
    source, destination = ends
    copy(mirror)
    before = rows(destination, topic_name)
    fill(source, topic_name, 50, seed=2)
    trim(source, topic_name, 50)

    copy(mirror)

    truth = rows_by_aiokafka(source.bootstrap, topic_name, start=50)
    assert [row.offset for row in truth] == list(range(50, 100))
    assert rows(destination, topic_name) == before + truth


@both_ways
def test_records_deleted_during_a_run_stop_the_mirror(ends, mirror, topic_name, monkeypatch):
    """The driver has seen them; when the executor asks they are gone."""
    source, destination = ends
    copy(mirror)
    fill(source, topic_name, 50, seed=2)
    before = rows(destination, topic_name)
    at_point(monkeypatch, "plan.dispatch", lambda: trim(source, topic_name, 80))

    facts = refused(mirror)

    assert (facts["reason"], facts["position"], facts["source_start"]) == ("SourceTrimmed", 50, 80)
    assert rows(destination, topic_name) == before


def trim(broker, topic, offset):
    """Delete the records before an offset."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    where = TopicPartition(topic, 0, offset)
    assert admin.delete_records([where])[where].result(30).low_watermark == offset


def at_point(monkeypatch, point, act, *, nth=1):
    """Do something when a crash point is reached for the nth time."""
    reached = []
    reach = failpoints.reach

    def reach_and_act(name):
        if name == point:
            reached.append(name)
            if len(reached) == nth:
                act()
        reach(name)

    monkeypatch.setattr(failpoints, "reach", reach_and_act)
    return reached


# Another topic of the same name


@pytest.mark.parametrize(("count", "reason"), [(20, "SourceWentBackwards"), (80, "ContentDiffers")])
def test_a_recreated_source_does_not_continue_the_old_replica(
    ends, mirror, topic_name, count, reason
):
    source, destination = ends
    copy(mirror)
    before = rows(destination, topic_name)
    make_again(source, topic_name, count)

    facts = refused(mirror)

    assert facts["reason"] == reason
    assert facts["topic"] == topic_name
    assert rows(destination, topic_name) == before


@both_ways
def test_a_recreated_source_that_starts_at_the_replicas_end_does_not_continue_it(
    ends, mirror, topic_name
):
    """Nothing can be compared: the copy itself says which topic it is of."""
    source, destination = ends
    copy(mirror)
    before = rows(destination, topic_name)
    make_again(source, topic_name, 50)
    trim(source, topic_name, 50)
    fill(source, topic_name, 20, seed=3)

    facts = refused(mirror)

    assert (facts["reason"], facts["position"]) == ("SourceRecreated", 50)
    assert (facts["topic"], facts["target_topic"]) == (topic_name, topic_name)
    assert rows(destination, topic_name) == before


@both_ways
def test_a_replica_continues_from_another_exact_replica(ends, mirror, topic_name):
    """Equal records prove more than the name of a topic: the first source may be lost."""
    source, destination = ends
    second = f"{topic_name}-second"
    to_second = mirror_to_cluster(
        topic_name, source.bootstrap, destination.bootstrap, name="second", topic=second
    )
    copy(mirror, to_second)
    fill(source, topic_name, 20, seed=2)
    copy(to_second)

    copy(
        mirror_to_cluster(
            second, destination.bootstrap, destination.bootstrap, name="third", topic=topic_name
        )
    )

    found = anomalies(source.bootstrap, topic_name, destination.bootstrap, topic_name)
    assert found == []


@both_ways
def test_recreating_the_source_stops_a_running_mirror(ends, mirror, topic_name):
    source, destination = ends

    def while_running():
        before = rows(destination, topic_name)
        make_again(source, topic_name, 80)
        return before

    before, error = stopped(mirror, destination, topic_name, while_running)

    assert error.facts["topic"] == topic_name
    assert rows(destination, topic_name) == before


def stopped(mirror, destination, topic, while_running):
    """Do something when all is copied and the mirror waits for more, which must end it."""
    try:
        with copying(mirror) as thread:
            wait_for_end(destination.bootstrap, topic, 50)
            done = while_running()
            thread.join(60)
            assert not thread.is_alive()
    except PositionError as error:
        return done, error
    pytest.fail("the mirror did not stop")


def make_again(broker, topic, count):
    broker.delete_topic(topic)
    broker.create_topic(topic)
    fill(broker, topic, count, seed=9)


# Records of others at the destination


@pytest.mark.parametrize("count", [1, 30])
def test_a_destination_with_foreign_records_is_refused(ends, mirror, topic_name, count):
    _, destination = ends
    destination.create_topic(topic_name)
    produce(destination.bootstrap, topic_name, [FOREIGN] * count)
    before = rows(destination, topic_name)

    facts = refused(mirror)

    assert (facts["reason"], facts["last"]) == ("ContentDiffers", count - 1)
    assert "not of the sourc" in str(facts["found"])
    assert str(facts["expected"]) != str(facts["found"])
    assert rows(destination, topic_name) == before


def test_a_destination_longer_than_its_source_is_refused(ends, mirror, topic_name):
    _, destination = ends
    destination.create_topic(topic_name)
    produce(destination.bootstrap, topic_name, [FOREIGN] * 51)
    before = rows(destination, topic_name)

    facts = refused(mirror)

    assert (facts["reason"], facts["position"], facts["last_stable_offset"]) == (
        "SourceWentBackwards",
        51,
        50,
    )
    assert rows(destination, topic_name) == before


def test_a_destination_whose_last_record_is_foreign_is_refused(ends, mirror, topic_name):
    source, destination = ends
    copy(mirror)
    produce(destination.bootstrap, topic_name, [FOREIGN])
    fill(source, topic_name, 20, seed=2)
    before = rows(destination, topic_name)

    facts = refused(mirror)

    assert (facts["reason"], facts["offset"]) == ("ContentDiffers", 50)
    assert rows(destination, topic_name) == before


@both_ways
@pytest.mark.parametrize("nth", [1, 3])
def test_a_foreign_record_is_detected_by_the_next_produce_response(
    ends, mirror, topic_name, monkeypatch, nth
):
    """It comes between the look and the send, where nothing can keep it out."""
    _, destination = ends
    at_point(
        monkeypatch,
        "produce.prepared",
        lambda: produce(destination.bootstrap, topic_name, [FOREIGN]),
        nth=nth,
    )
    mirror["destinations"][0]["max-batch-bytes"] = 0

    facts = refused(mirror)

    assert facts["reason"] == "ForeignRecord"
    assert (facts["topic"], facts["partition"]) == (topic_name, 0)
    assert facts["found"] == facts["expected"] + 1
    at = facts["expected"]
    copied = rows(destination, topic_name)
    assert [row.value for row in copied].index(FOREIGN.value) == at
    truth = rows(ends[0], topic_name)
    assert [row[3:] for row in copied[:at]] == [row[3:] for row in truth[:at]]
    again = refused(mirror)
    assert again["reason"] in {"ContentDiffers", "SourceWentBackwards"}
    assert rows(destination, topic_name) == copied, "nothing more is written"


@both_ways
def test_a_foreign_record_stops_an_idle_mirror(ends, mirror, topic_name):
    source, destination = ends

    def while_running():
        produce(destination.bootstrap, topic_name, [FOREIGN])
        before = rows(destination, topic_name)
        fill(source, topic_name, 5, seed=2)
        return before

    before, error = stopped(mirror, destination, topic_name, while_running)

    assert error.facts["topic"] == topic_name
    assert error.facts["reason"] in {"ContentDiffers", "SourceWentBackwards", "ForeignRecord"}
    assert rows(destination, topic_name)[: len(before)] == before
    if error.facts["reason"] != "ForeignRecord":
        assert rows(destination, topic_name) == before


def test_a_destination_with_incompatible_settings_is_refused(ends, topic_name):
    source, destination = ends
    source.create_topic(topic_name, config={"max.message.bytes": 2 << 20})
    fill(source, topic_name, 5, seed=1)
    destination.create_topic(topic_name, config={"max.message.bytes": 1 << 20})

    facts = refused(
        mirror_to_cluster(topic_name, source.bootstrap, destination.bootstrap),
        kind=UnfitTopicError,
    )

    assert [f.setting for f in facts["findings"] if f.severity == "error"] == ["max.message.bytes"]
    assert rows(destination, topic_name) == []


def test_a_recreated_destination_is_filled_exactly_after_foreign_records(ends, mirror, topic_name):
    source, destination = ends
    destination.create_topic(topic_name)
    produce(destination.bootstrap, topic_name, [FOREIGN])
    refused(mirror)
    destination.delete_topic(topic_name)

    copy(mirror)

    assert anomalies(source.bootstrap, topic_name, destination.bootstrap) == []
