"""Topics have the names that MirrorMaker 2 gives them, and names say the same as they do to it.

Method: the cases of MirrorMaker's own tests, each numbered in the name of the test; generated
names. `e2e/test_mirror_client.py` compares with Java.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.errors import UsageError
from logmirror.wire.replication_policy import ReplicationPolicy

DEFAULT = ReplicationPolicy()
IDENTITY = ReplicationPolicy(identity=True, source_alias="source")
UNDERSCORES = ReplicationPolicy(separator="__")
UNDERSCORES_IN_REPLICAS = ReplicationPolicy(separator="__", separates_internal_topics=False)
POLICIES = [
    DEFAULT,
    IDENTITY,
    UNDERSCORES,
    UNDERSCORES_IN_REPLICAS,
    ReplicationPolicy(separator="eat", identity=True),
]


# -- replicas --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "source", "upstream", "original"),
    [
        ("orders", None, None, "orders"),
        ("A.orders", "A", "orders", "orders"),
        ("A.B.t", "A", "B.t", "t"),
        ("us-west.a.b", "us-west", "a.b", "b"),
        ("foo.heartbeats", "foo", "heartbeats", "heartbeats"),
        (".hidden", "", "hidden", "hidden"),
        ("a..b", "a", ".b", "b"),
        ("a.", None, None, "a."),
        ("a..", None, None, "a.."),
        (".", None, None, "."),
        ("", None, None, ""),
    ],
)
def test_the_default_policy_reads_aliases_from_names(topic, source, upstream, original):
    assert DEFAULT.topic_source(topic) == source
    assert DEFAULT.upstream_topic(topic) == upstream
    assert DEFAULT.original_topic(topic) == original


@pytest.mark.parametrize(
    ("topic", "source", "upstream", "original"),
    [
        ("orders", "source", "orders", "orders"),
        ("A.orders", "source", "A.orders", "A.orders"),
        ("heartbeats", None, None, "heartbeats"),
        ("A.heartbeats", "A", "heartbeats", "heartbeats"),
        ("B.A.heartbeats", "B", "A.heartbeats", "heartbeats"),
        ("my-heartbeats", None, None, "my-heartbeats"),
    ],
)
def test_the_identity_policy_reads_aliases_of_heartbeats_only(topic, source, upstream, original):
    assert IDENTITY.topic_source(topic) == source
    assert IDENTITY.upstream_topic(topic) == upstream
    assert IDENTITY.original_topic(topic) == original


def test_the_identity_policy_without_an_alias_knows_no_source():
    policy = ReplicationPolicy(identity=True)

    assert policy.topic_source("orders") is None
    assert policy.topic_source("A.heartbeats") == "A"
    assert policy.hops("orders", "A") is None


def test_replicas_are_named_after_their_source():
    assert DEFAULT.remote_topic("A", "orders") == "A.orders"
    assert UNDERSCORES.remote_topic("A", "orders") == "A__orders"
    assert UNDERSCORES_IN_REPLICAS.remote_topic("A", "orders") == "A__orders"
    assert IDENTITY.remote_topic("A", "orders") == "orders"
    assert IDENTITY.remote_topic("A", "heartbeats") == "A.heartbeats"
    assert IDENTITY.remote_topic("A", "my-heartbeats") == "A.my-heartbeats"


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("topic3", "source1.topic3"),
        ("target2.topic3", "topic3"),
        ("source6.topic7", "source1.source6.topic7"),
        ("target2.source6.topic7", "topic7"),
    ],
)
def test_mm_10_checkpoints_name_the_topic_of_the_target(topic, expected):
    assert DEFAULT.checkpoint_topic("source1", "target2", topic) == expected


def test_checkpoints_of_the_identity_policy_keep_the_name():
    assert IDENTITY.checkpoint_topic("source", "target", "orders") == "orders"
    assert IDENTITY.checkpoint_topic("source", "target", "target.orders") == "target.orders"


def test_a_name_that_no_topic_can_have_is_none():
    long = "x" * 248
    assert DEFAULT.remote_topic("A", long) is None
    assert DEFAULT.remote_topic("A", "x" * 247) == f"A.{'x' * 247}"
    assert DEFAULT.remote_topic("a copy", "orders") is None
    assert DEFAULT.remote_topic("A", "orders\n") is None
    assert DEFAULT.remote_topic("", ".") is None  # ".." is a folder
    assert DEFAULT.checkpoint_topic("A", "B", long) is None
    assert DEFAULT.checkpoint_topic("A", "B", "B.a b") is None
    assert DEFAULT.checkpoints_topic("\u00e9") is None
    assert DEFAULT.checkpoints_topic("x" * 229) is None
    assert DEFAULT.offset_syncs_topic("a copy") is None
    assert DEFAULT.offset_syncs_topic("x" * 224) is None
    assert IDENTITY.remote_topic("A", "a b") is None


@pytest.mark.parametrize("separator", ["", ":", "a b", "\u00e9", ".\n"])
def test_a_separator_that_cannot_be_in_a_topic_is_refused(separator):
    with pytest.raises(UsageError, match="separator"):
        ReplicationPolicy(separator=separator)


# -- topics of MirrorMaker itself ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "is_internal"),
    [
        ("__consumer_offsets", True),
        (".hiddentopic", True),
        ("mm2-offsets.CLUSTER.internal", True),
        ("mm2-offset-syncs.CLUSTER.internal", True),
        ("CLUSTER.checkpoints.internal", True),
        ("mm2-offsets_CLUSTER_internal", False),
        # Release 3 copied none of these (KIP-1074).
        ("mm2-offsets-CLUSTER-internal", False),
        ("orders.internal", False),
        ("orders-internal", False),
        ("mm2-orders", False),
        ("orders", False),
    ],
)
def test_mm_46_internal_topics(topic, is_internal):
    assert DEFAULT.is_internal(topic) == is_internal
    assert IDENTITY.is_internal(topic) == is_internal


def test_mm_46_internal_topics_with_a_separator():
    assert UNDERSCORES.is_internal("mm2-offsets__CLUSTER__internal")
    assert not UNDERSCORES.is_internal("mm2-offsets.CLUSTER.internal")
    assert UNDERSCORES_IN_REPLICAS.is_internal("mm2-offsets.CLUSTER.internal")
    assert not UNDERSCORES_IN_REPLICAS.is_internal("mm2-offsets__CLUSTER__internal")


@pytest.mark.parametrize(
    ("policy", "syncs", "checkpoints"),
    [
        (DEFAULT, "mm2-offset-syncs.CLUSTER.internal", "CLUSTER.checkpoints.internal"),
        (IDENTITY, "mm2-offset-syncs.CLUSTER.internal", "CLUSTER.checkpoints.internal"),
        (UNDERSCORES, "mm2-offset-syncs__CLUSTER__internal", "CLUSTER__checkpoints__internal"),
        (
            UNDERSCORES_IN_REPLICAS,
            "mm2-offset-syncs.CLUSTER.internal",
            "CLUSTER.checkpoints.internal",
        ),
    ],
    ids=["default", "identity", "on", "off"],
)
def test_mm_47_the_separator_of_internal_topics(policy, syncs, checkpoints):
    assert policy.offset_syncs_topic("CLUSTER") == syncs
    assert policy.checkpoints_topic("CLUSTER") == checkpoints
    assert policy.is_checkpoints(checkpoints)
    assert policy.is_heartbeats("heartbeats")


@pytest.mark.parametrize("policy", [DEFAULT, IDENTITY], ids=["default", "identity"])
@pytest.mark.parametrize(
    ("topic", "is_heartbeats"),
    [
        ("heartbeats", True),
        ("source1.heartbeats", True),
        ("source2.source1.heartbeats", True),
        ("heartbeats!", False),
        ("!heartbeats", False),
        ("source1heartbeats", False),
        ("source1-heartbeats", False),
    ],
)
def test_mm_48_heartbeats(policy, topic, is_heartbeats):
    assert policy.is_heartbeats(topic) == is_heartbeats


def test_mm_48_checkpoints():
    assert DEFAULT.is_checkpoints("source1.checkpoints.internal")
    assert not DEFAULT.is_checkpoints("checkpoints.internal")
    assert not DEFAULT.is_checkpoints("checkpoints-internal")
    assert not UNDERSCORES.is_checkpoints("source1.checkpoints.internal")


def test_heartbeats_of_another_separator_are_ordinary_records():
    policy = ReplicationPolicy(separator="_")

    assert not policy.is_heartbeats("us-west.heartbeats")
    assert policy.is_heartbeats("us-west_heartbeats")


# -- chains of clusters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "source", "hops"),
    [
        ("source2.source1.topic", "source1", 2),
        ("source3.source2.source1.topic", "source1", 3),
        ("source3.source2.source1.topic", "source4", None),
        ("topic", "source1", None),
        ("", "", None),
        ("a.a.b.topic", "b", None),  # as Java does: the chain ends where an alias repeats
    ],
)
def test_mm_49_hops_of_a_topic(topic, source, hops):
    assert DEFAULT.hops(topic, source) == hops


CHAINS = [
    "topic1",
    "source4.topic1",
    "heartbeats",
    "source1.heartbeats",
    "source1.source2.heartbeats",
    "source3.heartbeats",
]


@pytest.mark.parametrize("policy", [DEFAULT, IDENTITY], ids=["default", "identity"])
@pytest.mark.parametrize(
    ("source", "hops"), [("source1", 1), ("source2", 2), ("source3", 1), ("source4", None)]
)
def test_mm_49_hops_by_heartbeats(policy, source, hops):
    assert policy.replication_hops(CHAINS, source) == hops


def test_mm_49_the_shortest_of_several_chains():
    topics = ["b.c.a.heartbeats", "b.a.heartbeats"]

    assert DEFAULT.replication_hops(topics, "a") == 2
    assert DEFAULT.replication_hops(reversed(topics), "a") == 2


@pytest.mark.parametrize("policy", [DEFAULT, IDENTITY], ids=["default", "identity"])
def test_mm_50_upstream_clusters(policy):
    assert policy.upstream_clusters(CHAINS) == {"source1", "source2", "source3"}
    assert policy.upstream_clusters(["heartbeats", ".heartbeats", "", "source4.t"]) == set()


@pytest.mark.parametrize("policy", [DEFAULT, IDENTITY], ids=["default", "identity"])
def test_mm_50_a_chain_that_repeats_an_alias_ends(policy):
    assert policy.upstream_clusters(["a.b.a.heartbeats"]) == {"a", "b"}


def test_mm_50_remote_topics():
    topics = ["topic1", "source1.topic1", "heartbeats", "source1.heartbeats"]

    def remote(policy: ReplicationPolicy) -> list[str]:
        return [topic for topic in topics if policy.topic_source(topic) is not None]

    assert remote(DEFAULT) == ["source1.topic1", "source1.heartbeats"]
    assert remote(IDENTITY) == ["topic1", "source1.topic1", "source1.heartbeats"]


@pytest.mark.parametrize(
    ("topic", "is_cycle"),
    [
        ("target.topic1", True),
        ("target.source.topic1", True),
        ("source.target.topic1", True),
        ("source.target.source.topic1", True),
        ("target.source.target.topic1", True),
        ("source.source.target.topic1", True),
        ("topic1", False),
        ("source.topic1", False),
        ("target", False),
    ],
)
def test_mm_36_cycles_of_the_default_policy(topic, is_cycle):
    assert DEFAULT.is_cycle(topic, "target") == is_cycle


@pytest.mark.parametrize(
    ("topic", "is_cycle"),
    [
        ("target.topic1", False),
        ("source.target.topic1", False),
        ("topic1", False),
        ("heartbeats", False),
        ("source.heartbeats", False),
        ("target.heartbeats", True),
        ("target.source.heartbeats", True),
        ("source.target.heartbeats", True),
    ],
)
def test_mm_36_cycles_of_the_identity_policy(topic, is_cycle):
    assert IDENTITY.is_cycle(topic, "target") == is_cycle


def test_mm_36_a_source_that_is_the_target_is_a_cycle():
    assert IDENTITY.is_cycle("topic1", "source")


# -- any names -------------------------------------------------------------------------------------

NAMES = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.sampled_from([".", "_", "__", "a", "source", "heartbeats", "beats", "mm2", "internal"]),
        max_size=12,
    ).map("".join),
)


@given(NAMES, NAMES, st.sampled_from(POLICIES))
def test_no_name_raises_or_never_ends(topic, alias, policy):
    for name in (
        policy.remote_topic(alias, topic),
        policy.checkpoint_topic(alias, topic, topic),
        policy.offset_syncs_topic(alias),
        policy.checkpoints_topic(alias),
    ):
        assert name is None or re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name)
    assert policy.original_topic(policy.original_topic(topic)) == policy.original_topic(topic)
    assert policy.is_heartbeats(topic) == (policy.original_topic(topic) == "heartbeats")
    assert "" not in policy.upstream_clusters([topic])
    hops = policy.hops(topic, alias)
    assert hops is None or (hops >= 1 and policy.is_cycle(topic, alias))
    assert policy.is_internal(topic) or not policy.is_checkpoints(topic)


@given(NAMES, st.sampled_from(["A", "us-west", "source"]))
def test_a_replica_leads_back_to_its_topic(topic, alias):
    for policy in (DEFAULT, UNDERSCORES):
        name = policy.remote_topic(alias, topic)
        if name is not None and topic.strip("._"):
            assert policy.topic_source(name) == alias
            assert policy.upstream_topic(name) == topic
            assert policy.is_cycle(name, alias)


def test_the_longest_chain_ends():
    assert DEFAULT.original_topic("a." * 124 + "t") == "t"
    assert DEFAULT.hops("a." * 123 + "b.t", "b") is None
    assert DEFAULT.is_cycle("a." * 123 + "b.t", "b")
