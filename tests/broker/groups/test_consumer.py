"""The consumer group protocol of KIP-848, statement by statement, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from kit.runs.group_world import TOPIC_ID, World
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.consumer_state import TopicInfo
from logmirror.broker.groups.values import State

OTHER_ID = b"another topic ID"


@pytest.fixture
def world() -> World:
    """A coordinator without groups; the topic `orders` has six partitions."""
    return World()


def numbers(result: Any) -> list[int]:
    """Return the partitions of `orders` in a response."""
    return sorted(number for topic, number in result.assignment if topic == TOPIC_ID)


def parts(*wanted: int) -> frozenset[tuple[bytes, int]]:
    return frozenset((TOPIC_ID, number) for number in wanted)


def test_the_first_member_gets_everything(world):
    joined = world.beat("a")

    assert (joined.member_id, joined.member_epoch) == ("a", 1)
    assert numbers(joined) == [0, 1, 2, 3, 4, 5]
    assert world.group().state is State.STABLE


def test_a_heartbeat_without_news_says_nothing_and_writes_nothing(world):
    world.beat("a")
    before = dict(world.stored)

    again = world.beat("a", 1)

    assert (again.member_epoch, again.assignment) == (1, None)
    assert world.stored == before


def test_partitions_are_given_up_before_another_member_gets_them(world):
    world.beat("a")
    joined = world.beat("b")
    assert (joined.member_epoch, numbers(joined)) == (2, [])
    assert world.group().state is State.RECONCILING

    asked = world.beat("a", 1)
    assert (asked.member_epoch, numbers(asked)) == (1, [0, 1, 2])
    assert world.beat("b", 2).assignment is None
    still = world.beat("a", 1, owned=parts(0, 1, 2, 3))
    assert (still.member_epoch, still.assignment) == (1, None)
    assert world.beat("b", 2).assignment is None

    done = world.beat("a", 1, owned=parts(0, 1, 2))
    assert done.member_epoch == 2
    assert numbers(world.beat("b", 2)) == [3, 4, 5]
    assert world.group().state is State.STABLE


def test_a_member_that_does_not_give_up_in_its_rebalance_timeout_is_removed(world):
    world.beat("a")
    world.beat("b")
    world.beat("a", 1)
    for _ in range(5):
        world.advance(4_500)
        world.beat("a", 1)
        found = world.beat("b", world.group().members["b"].epoch)

    assert world.beat("a", 1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert numbers(found._replace(assignment=frozenset(world.group().members["b"].assigned))) == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


def test_a_silent_member_is_removed(world):
    world.beat("a")
    world.beat("b")
    for _ in range(10):
        world.advance(5_000)
        world.beat("b", world.group().members["b"].epoch)

    assert list(world.group().members) == ["b"]
    assert len(world.group().members["b"].assigned) == 6


def test_fencing_by_epoch(world):
    world.beat("a")
    world.beat("b")
    world.beat("a", 1)
    world.beat("a", 1, owned=parts(0, 1, 2))

    assert world.beat("a", 3) is ErrorCode.FENCED_MEMBER_EPOCH
    assert world.beat("a", 1) is ErrorCode.FENCED_MEMBER_EPOCH
    assert world.beat("a", 1, owned=parts(5)) is ErrorCode.FENCED_MEMBER_EPOCH
    missed = world.beat("a", 1, owned=parts(0, 1, 2))  # its response was lost
    assert missed.member_epoch == 2
    assert world.beat("x", 1) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_that_joins_again_owns_nothing(world):
    world.beat("a")
    world.beat("b")
    world.beat("a", 1)
    again = world.beat("a")

    assert numbers(again) == [0, 1, 2]
    assert numbers(world.beat("b", 2)) == [3, 4, 5]


def test_leaving_frees_everything(world):
    world.beat("a")
    world.beat("b")
    assert world.beat("a", -1).member_epoch == -1

    assert numbers(world.beat("b", 2)) == [0, 1, 2, 3, 4, 5]
    world.beat("b", -1)
    assert world.group().state is State.EMPTY
    world.restart()
    assert world.group().is_empty


def test_a_static_member_that_leaves_for_a_moment_keeps_its_share(world):
    world.beat("a", instance_id="i")
    world.beat("b")
    world.beat("a", 1, instance_id="i")
    world.beat("a", 1, instance_id="i", owned=parts(0, 1, 2))
    world.beat("b", 2)
    busy = world.beat("c", instance_id="i")
    assert busy is ErrorCode.UNRELEASED_INSTANCE_ID
    assert world.beat("a", -2, instance_id="i").member_epoch == -2
    epoch = world.group().epoch
    world.restart()

    again = world.beat("c", instance_id="i")

    assert (numbers(again), again.member_epoch) == ([0, 1, 2], epoch)
    assert world.beat("a", 2, instance_id="i") is ErrorCode.FENCED_INSTANCE_ID
    assert world.beat("b", 2).assignment is None


def test_the_state_survives_a_crash_at_every_step(world):
    world.beat("a")
    world.beat("b")
    world.restart()
    world.beat("a", 1)
    world.restart()
    assert world.beat("b", 2).assignment is None  # "a" has not given up yet
    world.beat("a", 1, owned=parts(0, 1, 2))
    world.restart()

    assert numbers(world.beat("b", 2)) == [3, 4, 5]
    world.restart()
    assert world.beat("a", 2).assignment is None
    full = {"owned": parts(3, 4, 5), "topics": ("orders",), "rebalance_timeout_ms": 20_000}
    assert numbers(world.beat("b", 2, **full)) == [3, 4, 5]


def test_new_partitions_and_topics_are_assigned(world):
    world.beat("a", topics=("orders", "later"))
    world.topics["orders"] = TopicInfo(TOPIC_ID, 7)
    world.topics["later"] = TopicInfo(OTHER_ID, 1)
    assert world.beat("a", 1).assignment is None
    world.advance(1_000)

    found = world.beat("a", 1)

    assert numbers(found) == [0, 1, 2, 3, 4, 5, 6]
    assert (OTHER_ID, 0) in found.assignment
    del world.topics["orders"]
    world.advance(1_000)
    assert world.beat("a", 2).assignment == {(OTHER_ID, 0)}


def test_a_changed_subscription_starts_an_epoch(world):
    world.beat("a")
    world.topics["other"] = TopicInfo(OTHER_ID, 2)

    world.beat("a", 1, topics=("other",))
    found = world.beat("a", 1, owned=frozenset())

    assert (found.member_epoch, found.assignment) == (2, {(OTHER_ID, 0), (OTHER_ID, 1)})


def test_the_range_assignor_puts_equal_numbers_together(world):
    world.topics["other"] = TopicInfo(OTHER_ID, 6)
    fields = {"topics": ("orders", "other"), "assignor": "range"}
    world.beat("a", **fields)
    world.beat("b", **fields)
    shares = world.group().target

    assert shares["a"] == {(topic, n) for topic in (TOPIC_ID, OTHER_ID) for n in (0, 1, 2)}
    assert world.beat("c", assignor="x") is ErrorCode.UNSUPPORTED_ASSIGNOR
    assert list(world.group().members) == ["a", "b"]


def test_a_refused_member_makes_no_group_and_changes_the_type_of_none(world):
    assert world.beat("a", assignor="x") is ErrorCode.UNSUPPORTED_ASSIGNOR
    assert world.coordinator.groups == {}

    assert world.commit(offset=7) is ErrorCode.NONE
    assert world.beat("a", assignor="x") is ErrorCode.UNSUPPORTED_ASSIGNOR
    assert (world.group().type, world.committed()) == ("classic", 7)


@pytest.mark.parametrize(
    "fields",
    [
        {"group_id": ""},
        {"member_id": ""},
        {"instance_id": ""},
        {"rebalance_timeout_ms": -1},
        {"owned": None},
        {"owned": parts(1)},
        {"topics": None},
        {"epoch": -3},
        {"epoch": -2},
    ],
)
def test_bad_requests_are_refused(world, fields):
    fields = {"member_id": "a", **fields}
    assert world.beat(**fields) is ErrorCode.INVALID_REQUEST
    assert world.coordinator.groups == {}


def test_commits_need_the_epoch_of_the_member(world):
    joined = world.beat("a")._asdict()
    fields = {"member_id": "a", "generation": joined["member_epoch"], "knows_epochs": True}
    who = type("Who", (), fields)

    assert world.commit(who, 5) is ErrorCode.NONE
    who.generation = 0
    assert world.commit(who, 6) is ErrorCode.STALE_MEMBER_EPOCH
    # A producer aborts its transaction after this code; the other code is fatal to it.
    assert world.commit(who, 6, producer_id=1) is ErrorCode.ILLEGAL_GENERATION
    who.member_id = "x"
    assert world.commit(who, 6) is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.commit(None, 6) is ErrorCode.UNKNOWN_MEMBER_ID
    world.beat("a", -1)
    assert world.commit(None, 7) is ErrorCode.NONE
    assert world.committed() == 7


def test_a_group_changes_its_protocol_only_without_members(world):
    world.commit(None, 5)
    world.beat("a")
    assert world.join().error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    world.beat("a", -1)
    joined = world.join()
    assert (joined.error, joined.generation) == (ErrorCode.NONE, 3)
    world.sync(joined)
    assert world.beat("a") is ErrorCode.GROUP_ID_NOT_FOUND
    world.leave(joined.member_id)
    assert world.beat("a").member_epoch == 5
    world.restart()
    assert world.group().type == "consumer"
    assert world.committed() == 5


def test_a_client_that_only_asks_for_an_id_does_not_make_offsets_expire():
    world = World(offsets_retention_ms=3_600_000)
    world.beat("a")
    world.commit(None, 5, producer_id=1)
    world.call(lambda _, out: world.coordinator.end_transaction(1, out, is_committed=True))
    for _ in range(150):
        world.advance(30_000)
        world.beat("a", 1)
    world.beat("a", -1)  # the commit is older than the retention, the end of the group is not

    asked = world.join(requires_known_id=True)
    world.advance(1_300_000)

    assert asked.error is ErrorCode.MEMBER_ID_REQUIRED
    assert world.group().state is State.EMPTY
    assert world.committed() == 5
    world.advance(3_000_000)
    assert world.committed() == -1


def test_group_max_size():
    world = World(max_members=1)
    world.beat("a")

    assert world.beat("b") is ErrorCode.GROUP_MAX_SIZE_REACHED


def _by_regex(world: World, member_id: str, epoch: int, *matched: str, **fields: Any) -> Any:
    """Send a heartbeat of a member with a regular expression, which matches these topics now."""
    return world.beat(member_id, epoch, matched=frozenset(matched), **fields)


REGEX = {"topics": None, "regex": "orders.*"}


def test_a_member_with_a_regular_expression_gets_the_topics_that_it_matches(world):
    world.topics["orders-eu"] = TopicInfo(OTHER_ID, 2)

    joined = _by_regex(world, "a", 0, "orders", "orders-eu", **REGEX)

    assert joined.assignment == parts(0, 1, 2, 3, 4, 5) | {(OTHER_ID, 0), (OTHER_ID, 1)}
    assert world.group().topics() == {"orders", "orders-eu"}


def test_a_topic_that_a_regular_expression_matches_later_is_shared_by_all_that_have_it(world):
    _by_regex(world, "a", 0, "orders", **REGEX)
    _by_regex(world, "b", 0, "orders", **REGEX)
    world.topics["orders-eu"] = TopicInfo(OTHER_ID, 2)
    before = world.group().epoch

    _by_regex(world, "a", 1, "orders", "orders-eu")
    _by_regex(world, "b", 2, "orders", "orders-eu")

    assert world.group().epoch == before + 1
    shares = [
        {number for topic, number in share if topic == OTHER_ID}
        for share in world.group().target.values()
    ]
    assert sorted(shares, key=sorted) == [{0}, {1}]


def test_names_and_a_regular_expression_add_up_and_each_can_end(world):
    world.topics["orders-eu"] = TopicInfo(OTHER_ID, 1)
    both = _by_regex(world, "a", 0, "orders-eu", topics=("orders",), regex="orders-.*")
    assert len(both.assignment) == 7

    asked = world.beat("a", 1, regex="")
    assert asked.assignment == parts(0, 1, 2, 3, 4, 5)
    assert world.group().topics() == {"orders"}


def test_a_restart_keeps_what_a_regular_expression_matched(world):
    world.topics["orders-eu"] = TopicInfo(OTHER_ID, 1)
    _by_regex(world, "a", 0, "orders-eu", **REGEX)
    world.beat("b", topics=("orders",))

    world.restart()

    assert world.coordinator.regex_of("g", "a") == "orders.*"
    assert world.coordinator.regex_of("g", "b") == ""
    assert world.group().topics() == {"orders", "orders-eu"}
    epoch = world.group().epoch
    assert world.beat("b", 2).assignment is None
    assert world.group().epoch == epoch


def test_members_that_may_describe_different_topics_share_what_both_may_and_become_stable(world):
    world.topics["orders-eu"] = TopicInfo(OTHER_ID, 2)
    some, more = {"viewer": "User:a *"}, {"viewer": "User:b *"}
    _by_regex(world, "a", 0, "orders", **REGEX, **some)
    _by_regex(world, "b", 0, "orders", "orders-eu", **REGEX, **more)
    _by_regex(world, "a", 1, "orders", owned=parts(0, 1, 2), **some)
    before = world.group().epoch

    for _ in range(3):
        world.advance(5_000)
        _by_regex(world, "a", 2, "orders", **some)
        _by_regex(world, "b", 2, "orders", "orders-eu", **more)

    def topics(member_id: str) -> set[bytes]:
        return {topic for topic, _ in world.group().members[member_id].assigned}

    assert world.group().epoch == before
    assert world.group().state is State.STABLE
    assert (topics("a"), topics("b")) == ({TOPIC_ID}, {TOPIC_ID, OTHER_ID})
    world.restart()
    _by_regex(world, "a", 2, "orders", **some)
    _by_regex(world, "b", 2, "orders", "orders-eu", **more)
    assert world.group().epoch == before
    world.beat("c")  # a new target, before the others are heard again
    for _ in range(3):
        _by_regex(world, "a", world.group().members["a"].epoch, "orders", **some)
        assert topics("a") <= {TOPIC_ID}


def test_a_member_that_has_left_leaves_no_regular_expression_behind(world):
    world.topics["orders-eu"] = TopicInfo(OTHER_ID, 1)
    _by_regex(world, "a", 0, "orders-eu", **REGEX)
    world.beat("b", topics=("orders",))

    world.beat("a", -1)

    assert world.group().topics() == {"orders"}
