"""The driver's part: how long a flow without sequence check waits for its predecessors.

Method: a scripted destination, and a clock that the test moves.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from kit.fakes.scripted import SteppingClock
from logmirror.cluster.offsets import LogEnd, ProducerState
from logmirror.cluster.transport import LINGER_MS_MAX
from logmirror.errors import UsageError
from logmirror.mirror.ports import Begun, FlowId, KafkaSpec, SourceView, Start
from logmirror.to_kafka.idempotence import SEND_DEADLINE_MS, quiesce_ms
from logmirror.to_kafka.preserve_destination import LaneClusters, PreserveDestination

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
SPEC = KafkaSpec(cluster=None, topic="copy")
WAIT_MS = quiesce_ms(SPEC.max_message_bytes)
DAY_MS = 86_400_000


def start_at(position, topic_id=None):
    view = SourceView(topic_id=topic_id, log_start=0, last_stable_offset=1000)
    return Start(position=position, leader_epoch=-1, tail_checked=False, view=view)


@dataclass
class Cluster:
    """One partition of a destination."""

    end: int = 0
    state: ProducerState | None = None
    asked: list = field(default_factory=list)

    def producer_states(self, producers):
        return dict.fromkeys(producers, self.state)

    def log_ends(self, partitions):
        return {where: LogEnd(self.end, 0) for where in partitions}


class Opening:
    """A flow that begins."""

    def __init__(self, spec=SPEC, **cluster):
        self.clock, self.cluster = SteppingClock(), Cluster(**cluster)
        clusters = LaneClusters(lambda _settings: self.cluster, self.clock)
        self.copies = PreserveDestination(spec, clusters)

    def look(self):
        """Open a flow as the service does; returns whether it may copy."""
        self.position = self.copies.positions([FLOW], None)[FLOW]
        self.wait_ms = self.copies.begin(FLOW, start_at(self.position)).wait_ms
        return self.wait_ms == 0

    def look_after(self, wait_ms):
        self.clock.ms += wait_ms
        return self.look()


def alive(opening, age_ms=0):
    return ProducerState(0, 99, opening.clock.now_ms() - age_ms)


def test_a_flow_whose_producer_the_broker_remembers_begins_at_once():
    opening = Opening(end=100)
    opening.cluster.state = alive(opening)
    assert opening.look()


@pytest.mark.parametrize("age_ms", [None, DAY_MS])
def test_a_flow_without_sequence_check_waits_and_reads_the_log_end_again(age_ms):
    opening = Opening(end=100)
    if age_ms is not None:
        opening.cluster.state = alive(opening, age_ms)

    assert not opening.look()
    assert opening.wait_ms == WAIT_MS
    assert opening.look_after(WAIT_MS)


def test_a_live_predecessor_is_not_interrupted():
    opening = Opening(end=100)
    opening.look()
    for end in (105, 190):
        opening.cluster.end = end
        assert not opening.look_after(WAIT_MS)
        assert opening.wait_ms == WAIT_MS

    assert opening.look_after(WAIT_MS)
    assert opening.position == 190


def test_a_wait_is_not_good_for_ever():
    opening = Opening(end=100)
    opening.look()
    assert not opening.look_after(2 * WAIT_MS + 1)


def test_a_wait_that_is_over_counts_for_one_position():
    opening = Opening(end=100)
    opening.look()
    assert opening.look_after(WAIT_MS)
    assert opening.look_after(1), "the same moment, for another reason"
    opening.cluster.end = 101
    assert not opening.look_after(1)


def test_the_wait_is_longer_than_a_predecessors_bytes_can_be_on_their_way():
    for largest in (0, 1 << 20, 64 << 20):
        assert quiesce_ms(largest) > SEND_DEADLINE_MS + largest / 1000 + LINGER_MS_MAX


def test_topics_of_large_batches_are_waited_for_longer():
    opening = Opening(KafkaSpec(cluster=None, topic="copy", max_message_bytes=50_000_000), end=9)
    opening.look()
    assert not opening.look_after(WAIT_MS)
    opening.look()
    assert opening.look_after(WAIT_MS + 49_000)


def test_settings_that_we_may_not_see_are_taken_for_the_usual_ones():
    def refuse(_name):
        raise UsageError("not allowed")

    opening = Opening()
    opening.cluster.describe_topic_configs = refuse
    assert opening.copies._max_message_bytes() == SPEC.max_message_bytes  # noqa: SLF001  # the least of it
    opening.cluster.describe_topic_configs = lambda _name: {"max.message.bytes": "77"}
    assert opening.copies._max_message_bytes() == 77  # noqa: SLF001  # as above


def test_the_destinations_of_a_lane_read_a_clusters_settings_once():
    """Both topics were created by this process, so neither destination waits."""
    asked, cluster, clock = [], Cluster(), SteppingClock()
    cluster.describe_topic_configs = lambda _name: {}
    cluster.topic = lambda _name: SimpleNamespace(topic_id=b"c" * 16)
    cluster.admin = SimpleNamespace(
        broker_configs=lambda: asked.append(1) or {1: {"producer.id.expiration.ms": "60000"}}
    )
    clusters = LaneClusters(lambda _settings: cluster, clock, created={(None, "copy")})
    topic = SimpleNamespace(name="t", topic_id=b"t" * 16, partitions={})
    for _ in range(2):
        copies = PreserveDestination(replace(SPEC, topic_sync="off"), clusters)
        copies.prepare(None, topic, None)
        assert (copies.spec.producer_state_age_ms, copies.spec.source_id) == (30_000, b"t" * 16)
        assert copies.spec.topic_id == b"c" * 16
        copies.positions([FLOW], None)
        assert copies.begin(FLOW, start_at(0, topic_id=b"t" * 16)) == Begun()
    assert asked == [1]
