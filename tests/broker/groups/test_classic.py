"""The classic group protocol, statement by statement, in virtual time."""

from __future__ import annotations

import pytest

from kit.runs.group_world import TOPIC_ID, World
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.classic import NEW_MEMBER_TIMEOUT_MS
from logmirror.broker.groups.values import Effects, State
from logmirror.errors import CorruptionError


@pytest.fixture
def world() -> World:
    """A coordinator without groups."""
    return World()


def test_kip_394_a_new_member_gets_an_id_first(world):
    refused = world.join(requires_known_id=True)

    assert refused.error is ErrorCode.MEMBER_ID_REQUIRED
    assert not world.group().members
    joined = world.join(refused.member_id, requires_known_id=True)
    assert (joined.error, joined.member_id) == (ErrorCode.NONE, refused.member_id)


def test_kip_394_an_id_that_is_not_used_expires(world):
    refused = world.join(requires_known_id=True)
    world.advance(10_000)

    assert world.join(refused.member_id).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_rebalance_waits_for_a_member_that_asked_for_its_id(world):
    [first] = world.stable()
    second = world.join(requires_known_id=True)
    third = world.join()

    waiting = world.join(first.member_id)
    assert isinstance(waiting, str)
    world.join(second.member_id, requires_known_id=True)
    assert world.replies[waiting].generation == world.replies[third].generation == 2


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group_id": ""}, ErrorCode.INVALID_GROUP_ID),
        ({"session_timeout_ms": 5_999}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"session_timeout_ms": 1_800_001}, ErrorCode.INVALID_SESSION_TIMEOUT),
        ({"protocols": ()}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocol_type": ""}, ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ({"member_id": "unknown"}, ErrorCode.UNKNOWN_MEMBER_ID),
    ],
)
def test_bad_joins_are_refused_and_create_no_group(world, fields, code):
    assert world.join(**fields).error is code
    assert world.coordinator.groups == {}


@pytest.mark.parametrize("fields", [{"protocol_type": "connect"}, {"protocols": (("other", b""),)}])
def test_a_member_without_a_common_protocol_is_refused(world, fields):
    world.stable()

    assert world.join(**fields).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_the_protocol_is_the_one_most_members_prefer_and_all_support(world):
    a, b, c = (
        (("a", b""), ("b", b""), ("x", b"")),
        (("b", b""), ("a", b"")),
        (("b", b""), ("a", b"")),
    )
    first = world.join(protocols=a)
    second = world.join(protocols=b)
    third = world.join(protocols=c)
    world.join(first.member_id, protocols=a)

    assert world.replies[second].protocol == world.replies[third].protocol == "b"


def test_only_the_leader_gets_the_subscriptions(world):
    first = world.join(protocols=(("range", b"one"),))
    second = world.join(protocols=(("range", b"two"),))
    world.join(first.member_id, token="again", protocols=(("range", b"one"),))

    leader, follower = world.replies["again"], world.replies[second]
    assert {data for _, _, data in leader.members} == {b"one", b"two"}
    assert follower.members == ()
    assert follower.leader == leader.member_id == first.member_id


def test_members_get_the_assignments_of_the_leader_as_they_are(world):
    first = world.join()
    second = world.join()
    world.join(first.member_id, token="again")
    leader, follower = world.replies["again"], world.replies[second]

    waiting = world.sync(follower)
    assert isinstance(waiting, str)
    shares = {leader.member_id.replace("-", "_"): b"\0opaque", follower.member_id: b"\xff"}
    assert world.sync(leader, **shares).assignment == b"\0opaque"
    assert world.replies[waiting].assignment == b"\xff"
    assert world.sync(follower).assignment == b"\xff"  # its response was lost


def test_the_assignment_is_durable_before_a_member_gets_it(world):
    joined = world.join()
    world.sync(joined, **{joined.member_id: b"share"})

    world.restart()

    assert world.group().state is State.STABLE
    assert world.heartbeat(joined) is ErrorCode.NONE
    assert world.sync(joined).assignment == b"share"


def test_after_a_restart_a_member_of_an_unfinished_rebalance_joins_again(world):
    [first] = world.stable()
    second = world.join()
    again = world.join(first.member_id)

    world.restart()

    assert world.sync(again).error is ErrorCode.ILLEGAL_GENERATION
    assert world.heartbeat(first) is ErrorCode.NONE
    assert world.sync(world.replies[second]).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert isinstance(world.join(), str)


def test_heartbeats_keep_a_member_and_announce_a_rebalance(world):
    [first] = world.stable()
    for _ in range(10):
        world.advance(9_000)
        assert world.heartbeat(first) is ErrorCode.NONE
    second = world.join()

    assert world.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS
    world.join(first.member_id)
    assert world.replies[second].generation == 2
    assert world.heartbeat(first) is ErrorCode.ILLEGAL_GENERATION


def test_a_silent_member_is_removed_and_the_others_rebalance(world):
    first, second = world.stable(2)
    world.advance(9_000)
    world.heartbeat(first)
    world.advance(2_000)

    assert world.heartbeat(second) is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS
    assert world.join(first.member_id).generation == second.generation + 1


def test_kip_62_a_member_that_does_not_rejoin_in_the_rebalance_timeout_is_removed(world):
    first, second = world.stable(2)
    waiting = world.join(first.member_id)
    for _ in range(4):
        world.advance(4_900)
        assert world.heartbeat(second) is ErrorCode.REBALANCE_IN_PROGRESS
    assert waiting not in world.replies
    world.advance(400)

    assert world.replies[waiting].generation == 3
    assert world.heartbeat(second) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_leader_that_never_syncs_is_removed_and_the_others_join_again(world):
    first = world.join()
    second = world.join()
    world.join(first.member_id)
    waiting = world.sync(world.replies[second])

    for _ in range(5):  # the leader still sends heartbeats
        world.advance(4_500)
        group = world.group()
        world.heartbeat(world.replies[second]._replace(member_id=first.member_id))

    assert world.replies[waiting].error is ErrorCode.REBALANCE_IN_PROGRESS
    assert first.member_id not in group.members


def test_a_new_member_that_gave_up_waiting_is_forgotten(world):
    [first] = world.stable(rebalance_timeout_ms=10_000_000)
    phantom = world.join()
    for _ in range(NEW_MEMBER_TIMEOUT_MS // 5_000 + 1):
        world.advance(5_000)
        assert world.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS

    assert world.replies[phantom].error is ErrorCode.UNKNOWN_MEMBER_ID
    assert list(world.group().members) == [first.member_id]


def test_leaving_starts_a_rebalance_and_the_last_one_empties_the_group(world):
    first, second = world.stable(2)

    assert world.leave(second.member_id) is ErrorCode.NONE
    assert world.leave(second.member_id) is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS
    assert world.leave(first.member_id) is ErrorCode.NONE
    assert world.group().state is State.EMPTY
    world.restart()
    assert world.group().state is State.EMPTY
    assert world.group().generation == 3


def test_a_follower_that_joins_again_unchanged_gets_the_same_generation(world):
    first, second = world.stable(2)

    assert world.join(second.member_id).generation == second.generation
    assert world.group().state is State.STABLE
    assert isinstance(world.join(first.member_id), str)  # the leader asks for a rebalance
    assert world.group().state is State.PREPARING


def test_a_changed_subscription_starts_a_rebalance(world):
    _, second = world.stable(2)

    assert isinstance(world.join(second.member_id, protocols=(("range", b"new"),)), str)


def test_the_initial_rebalance_waits_for_more_members():
    world = World(initial_rebalance_delay_ms=3_000)
    first = world.join()
    world.advance(2_000)
    second = world.join()
    world.advance(1_500)
    assert world.replies == {}
    world.advance(3_000)

    assert world.replies[first].generation == world.replies[second].generation == 1


def test_a_second_join_of_a_waiting_member_ends_the_first(world):
    first, _ = world.stable(2)
    waiting = world.join(first.member_id)
    again = world.join(first.member_id)

    assert world.replies[waiting].error is ErrorCode.REBALANCE_IN_PROGRESS
    assert again not in world.replies


def test_group_max_size():
    world = World(max_members=2)
    world.stable(2)

    assert world.join().error is ErrorCode.GROUP_MAX_SIZE_REACHED


def test_group_limits():
    world = World(max_groups=1, max_bytes=4_000)
    world.stable()

    assert world.join(group_id="other").error is ErrorCode.POLICY_VIOLATION
    assert world.join(protocols=(("range", b"x" * 4_000),)).error is ErrorCode.POLICY_VIOLATION
    world.leave(next(iter(world.group().members)))
    world.advance(600_000)
    assert world.coordinator.groups == {}
    assert world.join(group_id="other").error is ErrorCode.NONE


# Static members


def _static(world: World, instance_id: str, member_id: str = "", **fields: object):
    return world.join(member_id, instance_id=instance_id, **fields)


def test_kip_345_a_restarted_static_member_keeps_its_share_without_a_rebalance(world):
    joined = _static(world, "a")
    world.sync(joined, **{joined.member_id: b"share"})

    again = _static(world, "a")

    assert (again.error, again.generation) == (ErrorCode.NONE, joined.generation)
    assert again.member_id != joined.member_id
    assert world.sync(again).assignment == b"share"


def test_kip_345_the_old_member_of_an_instance_is_fenced(world):
    joined = _static(world, "a")
    world.sync(joined)
    again = _static(world, "a")

    assert _static(world, "a", joined.member_id).error is ErrorCode.FENCED_INSTANCE_ID
    assert world.heartbeat(joined) is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.commit(joined) is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.commit(again) is ErrorCode.NONE
    world.restart()
    assert world.commit(joined) is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.commit(again) is ErrorCode.NONE


def test_kip_345_a_static_member_is_kept_until_its_session_ends(world):
    first = _static(world, "a")
    world.sync(first)
    waiting = world.join()
    world.advance(9_000)
    assert waiting not in world.replies
    world.advance(2_000)

    assert world.replies[waiting].generation == 2
    assert _static(world, "a", first.member_id).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_kip_345_leaving_by_instance_id(world):
    joined = _static(world, "a")
    world.sync(joined)

    assert world.leave("other", "a") is ErrorCode.FENCED_INSTANCE_ID
    assert world.leave("", "b") is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.leave("", "a") is ErrorCode.NONE
    assert world.group().state is State.EMPTY


def test_kip_814_a_returning_leader_gets_the_subscriptions_and_does_not_assign(world):
    joined = _static(world, "a")
    world.sync(joined)

    again = _static(world, "a")
    assert (again.leader, again.skips_assignment) == (again.member_id, True)
    assert [one[1] for one in again.members] == ["a"]
    older = _static(world, "a", may_skip_assignment=False)
    assert (older.leader, older.skips_assignment) == (again.member_id, False)
    assert older.members == ()


# Offsets


def test_a_commit_needs_the_current_generation(world):
    [first] = world.stable()
    assert world.commit(first, 5) is ErrorCode.NONE
    assert world.commit(first._replace(generation=0), 6) is ErrorCode.ILLEGAL_GENERATION
    assert world.commit(first._replace(member_id="x"), 6) is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.commit(None, 6) is ErrorCode.UNKNOWN_MEMBER_ID
    second = world.join()
    assert world.commit(first, 7) is ErrorCode.NONE  # before it revokes
    again = world.join(first.member_id)
    assert world.commit(first, 8) is ErrorCode.ILLEGAL_GENERATION
    assert world.commit(again, 8) is ErrorCode.REBALANCE_IN_PROGRESS
    assert world.replies[second].generation == again.generation
    assert world.committed() == 7


def test_a_transaction_commits_offsets_of_a_member_that_has_joined_and_not_synced(world):
    joined = world.join()

    assert world.commit(joined, 5) is ErrorCode.REBALANCE_IN_PROGRESS
    assert world.commit(joined, 5, producer_id=1) is ErrorCode.NONE
    old = joined._replace(generation=joined.generation - 1)
    assert world.commit(old, 6, producer_id=1) is ErrorCode.ILLEGAL_GENERATION


def test_any_client_commits_to_a_group_without_members(world):
    assert world.commit(None, 5) is ErrorCode.NONE
    world.restart()
    assert world.committed() == 5
    assert world.commit(None, 3) is ErrorCode.NONE
    assert world.committed() == 3


def started_with(world, topic_ids):
    """Start again with these topics."""
    world.coordinator = type(world.coordinator)(world.settings, world.topics.get)
    out = Effects()
    out.changes += world.coordinator.load(world.rows, topic_ids, world.now)
    world.take(out)


def added(world, topic_id):
    world.call(lambda _, out: world.coordinator.topic_added("orders", topic_id, out))


def test_offsets_of_an_earlier_topic_of_the_name_are_dropped_at_the_start(world):
    world.commit(None, 5)
    world.commit(None, 5, partition=1, producer_id=1)
    started_with(world, {"orders": b"another topic ID"})

    assert world.committed() == -1
    assert world.stored == {}
    assert world.coordinator.offsets.count == 0


def test_offsets_of_a_topic_that_is_away_stay_until_another_one_of_its_name_appears(world):
    """An archive may be away. A deletion that a crash interrupted looks the same."""
    world.commit(None, 5)
    world.commit(None, 6, partition=1, producer_id=1)
    before = dict(world.stored)
    for _ in range(2):
        started_with(world, {})
        assert world.committed() == 5
        assert world.stored == before
    added(world, TOPIC_ID)
    assert world.stored == before
    started_with(world, {})
    added(world, b"another topic ID")

    assert world.committed() == -1
    assert world.stored == {}
    assert world.coordinator.offsets.count == 0


def test_offsets_of_a_topic_that_stays_away_expire():
    world = World(offsets_retention_ms=3_600_000)
    world.commit(None, 5)
    started_with(world, {})
    world.advance(3_000_000)
    assert world.committed() == 5
    world.advance(1_300_000)

    assert world.committed() == -1
    assert world.stored == {}


def test_a_deleted_topic_takes_its_offsets_along(world):
    world.commit(None, 5)
    world.commit(None, 5, producer_id=1)
    world.call(lambda _, out: world.coordinator.topic_deleted("orders", out))

    assert world.committed() == -1
    assert world.stored == {}
    assert world.coordinator.offsets.count == 0


def test_kip_211_offsets_expire_after_the_group_became_empty():
    world = World(offsets_retention_ms=3_600_000)
    [member] = world.stable()
    world.commit(member, 5)
    for _ in range(500):
        world.advance(9_000)
        assert world.heartbeat(member) is ErrorCode.NONE
    assert world.committed() == 5
    world.leave(member.member_id)
    world.advance(3_000_000)
    assert world.committed() == 5
    world.advance(1_300_000)

    assert world.committed() == -1
    assert world.coordinator.groups == {}
    assert world.stored == {}


def test_offsets_of_a_topic_that_no_member_subscribes_to_expire():
    world = World(offsets_retention_ms=3_600_000)
    [member] = world.stable(protocols=(("range", b"\0\0\0\0\0\1\0\5other"),))
    world.commit(member, 5)
    for _ in range(500):
        world.advance(9_000)
        world.heartbeat(member)

    assert world.committed() == -1
    assert world.group().state is State.STABLE


def test_offsets_of_an_open_transaction_are_not_visible_until_it_commits(world):
    world.commit(None, 5)
    world.commit(None, 6, producer_id=1)
    world.commit(None, 7, partition=1, producer_id=2)
    offsets = world.coordinator.offsets

    assert world.committed() == 5
    assert offsets.is_pending("g", ("orders", 0))
    world.restart()
    offsets = world.coordinator.offsets
    assert offsets.is_pending("g", ("orders", 0))
    end = world.coordinator.end_transaction
    world.call(lambda _, out: end(1, out, is_committed=True))
    world.call(lambda _, out: end(2, out, is_committed=False))
    assert (world.committed(), world.committed(1)) == (6, -1)
    assert not offsets.is_pending("g", ("orders", 0))
    world.restart()
    assert (world.committed(), world.committed(1)) == (6, -1)


def test_a_damaged_value_stops_the_start_with_its_key(world):
    world.commit(None, 5)
    [key] = world.stored
    world.stored[key] = world.stored[key][:-1] + b"\xff"

    with pytest.raises(CorruptionError, match="committed offset"):
        world.restart()
