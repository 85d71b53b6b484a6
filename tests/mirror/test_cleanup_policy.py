"""The cleanup policy of a source topic is read again while its flows are open.

Method: a scripted client with a policy that changes; the flow's next slice must accept, or refuse,
a gap accordingly. tests/cluster shows the request against Apache Kafka.
"""

import pytest

from kit.fakes.scripted import TOPIC_ID, Log, ScriptedClient, SteppingClock, archive_spec, batches
from logmirror.errors import UnavailableError
from logmirror.mirror.cleanup_policy import REFRESH_MS, CleanupPolicies
from logmirror.mirror.flow_state import DAY_MS, FlowState
from logmirror.mirror.ports import FlowId


class Client(ScriptedClient):
    def __init__(self, **configs):
        super().__init__([Log(batches(0, 5))], configs=configs)
        self.requests = []
        self.error = None

    def describe_configs_of_topics(self, names, keys):
        self.requests.append((list(names), tuple(keys)))
        if self.error:
            raise self.error
        return super().describe_configs_of_topics(names, keys)


def state_of(topic="t", *, compacted=False, partition=0):
    return FlowState(
        flow=FlowId(mirror="m", destination="d", topic=topic, partition=partition),
        destination=archive_spec(),
        topic_id=TOPIC_ID,
        compacted=compacted,
        position=0,
    )


@pytest.mark.parametrize(
    ("policy", "compacted"),
    [("compact", True), ("compact,delete", True), ("delete", False), (None, None)],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_policy_that_changed_is_known_after_a_refresh(policy, compacted, before):
    clock, state = SteppingClock(), state_of(compacted=before)
    client = Client()
    if policy is not None:
        client.configs = {"cleanup.policy": policy, "delete.retention.ms": "1234"}
        CleanupPolicies(clock).refresh("source", client, [state])
        assert (state.compacted, state.delete_retention_ms) == (compacted, 1234)
    else:
        client.describe_configs_of_topics = lambda _names, _keys: {}  # not reported
        CleanupPolicies(clock).refresh("source", client, [state])
        assert state.compacted is before


def test_a_missing_retention_is_a_day():
    client, state = Client(**{"cleanup.policy": "compact"}), state_of()
    CleanupPolicies(SteppingClock()).refresh("source", client, [state])
    assert state.delete_retention_ms == DAY_MS


def test_one_request_serves_all_topics_of_a_source_and_is_rare():
    clock, client = SteppingClock(), Client(**{"cleanup.policy": "compact"})
    policies = CleanupPolicies(clock)
    states = [state_of(topic, partition=n) for topic in ("b", "a") for n in range(3)]
    for _ in range(5):
        policies.refresh("source", client, states)
        clock.ms += REFRESH_MS // 5
    assert client.requests == [(["a", "b"], ("cleanup.policy", "delete.retention.ms"))]
    policies.refresh("source", client, states)
    policies.refresh("other source", client, states)
    assert len(client.requests) == 3
    assert all(state.compacted for state in states)


def test_no_flows_no_request():
    client = Client()
    CleanupPolicies(SteppingClock()).refresh("source", client, [])
    assert client.requests == []


def test_a_source_that_does_not_respond_leaves_the_last_known_policy():
    clock, client, state = SteppingClock(), Client(), state_of(compacted=True)
    client.error = UnavailableError("no response")
    policies = CleanupPolicies(clock)
    policies.refresh("source", client, [state])
    assert state.compacted
    client.error, client.configs = None, {"cleanup.policy": "delete"}
    clock.ms += REFRESH_MS
    policies.refresh("source", client, [state])
    assert not state.compacted
