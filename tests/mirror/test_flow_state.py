"""The phases of a flow: the whole table of events, and that only its module writes the fields.

Method: each event is reported to a flow in each phase. What must follow is written down here once
more, phase by phase.
"""

import ast
import dataclasses
from pathlib import Path

import pytest

import logmirror
from kit.fakes.scripted import archive_spec
from logmirror.errors import InternalError
from logmirror.mirror.flow_state import (
    DAY_MS,
    MARGIN_MS,
    TRANSITIONS,
    Event,
    FlowState,
    Phase,
)
from logmirror.mirror.ports import Begun, FlowId, KafkaSpec, Slice, SliceResult, SourceView, Start

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
NOW_MS = 1000
VIEW = SourceView(topic_id=b"t" * 16, log_start=3, last_stable_offset=99, leader_epoch=7)
START = Start(position=20, leader_epoch=6, tail_checked=False, view=VIEW)
RESULT = SliceResult(
    slice=Slice(flow=FLOW, topic_id=None, compacted=False, first=10, end=12, tail=None),
    receipts=(),
    next_offset=12,
    fenced=True,
    in_flight_max=4,
)

REPORTS = {
    Event.OPENED: lambda state: state.opened(START, Begun(), NOW_MS),
    Event.HELD: lambda state: state.opened(START, Begun(wait_ms=500), NOW_MS),
    Event.OBSERVED: lambda state: state.observe(50, NOW_MS),
    Event.COMPARED: lambda state: state.compared(9, 8, is_proven=False),
    Event.ADVANCED: lambda state: state.advance(RESULT, 12, NOW_MS),
    Event.COMMITTED: lambda state: state.committed(),
    Event.FAILED: lambda state: state.failed(NOW_MS),
    Event.OUTDATED: lambda state: state.outdated(),
}
READY, WAITING, STALE, STALE_WAITING = Phase
FOLLOWING = {  # after READY, WAITING, STALE, STALE_WAITING; None: the event is refused
    Event.OPENED: [None, None, READY, READY],
    Event.HELD: [None, None, STALE_WAITING, STALE_WAITING],
    Event.OBSERVED: [READY, WAITING, None, None],
    Event.COMPARED: [READY, WAITING, None, None],
    Event.ADVANCED: [READY, WAITING, STALE, STALE_WAITING],
    Event.COMMITTED: [READY, READY, STALE, STALE],
    Event.FAILED: [WAITING, WAITING, STALE_WAITING, STALE_WAITING],
    Event.OUTDATED: [STALE, STALE_WAITING, STALE, STALE_WAITING],
}


def flow_in(phase, spec=None):
    state = FlowState(
        flow=FLOW,
        destination=spec or KafkaSpec(cluster=None, topic="t"),
        topic_id=None,
        compacted=False,
        position=10,
    )
    if phase in {Phase.WAITING, Phase.STALE_WAITING}:
        state.failed(0)
    if phase in {Phase.STALE, Phase.STALE_WAITING}:
        state.outdated()
    assert state.phase is phase
    return state


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
@pytest.mark.parametrize("event", Event, ids=lambda event: event.value)
def test_each_event_in_each_phase(event, phase):
    state = flow_in(phase)
    before = dataclasses.asdict(state)
    expected = FOLLOWING[event][list(Phase).index(phase)]
    if expected is None:
        with pytest.raises(InternalError) as caught:
            REPORTS[event](state)
        assert caught.value.facts == {
            "flow": "m/d/t-0",
            "event": event.value,
            "phase": phase.value,
        }
        assert dataclasses.asdict(state) == before
        return
    REPORTS[event](state)
    assert state.phase is expected
    waits = expected in {Phase.WAITING, Phase.STALE_WAITING}
    assert (state.retry_at_ms > 0) == waits
    assert state.position_stale == (expected in {Phase.STALE, Phase.STALE_WAITING})
    assert state.is_free(0) == (expected is Phase.READY)


def test_the_table_has_no_other_rows():
    assert set(TRANSITIONS) == set(FOLLOWING) == set(REPORTS) == set(Event)


def test_a_wait_is_over_at_its_time():
    state = flow_in(Phase.READY)
    wait_ms = state.failed(NOW_MS)
    assert state.backs_off(NOW_MS + wait_ms - 1)
    assert not state.is_free(NOW_MS + wait_ms - 1)
    assert not state.backs_off(NOW_MS + wait_ms)
    assert state.is_free(NOW_MS + wait_ms)


def test_failures_count_until_a_commit():
    state = flow_in(Phase.READY)
    for failures in (1, 2):
        state.failed(NOW_MS)
        assert state.failures == failures
    state.outdated()
    state.opened(START, Begun(), NOW_MS)
    assert state.failures == 2
    state.committed()
    assert (state.failures, state.retry_at_ms, state.phase) == (0, 0, Phase.READY)


def test_a_new_position_begins_with_nothing_of_the_one_before():
    state = flow_in(Phase.READY)
    state.advance(RESULT, 12, NOW_MS)
    assert (state.fenced, state.in_flight_max, state.tail_checked) == (True, 4, True)
    state.outdated()
    state.opened(START, Begun(newest="n", snapshot_ms=5, rebuild=True), NOW_MS)
    assert (state.fenced, state.in_flight_max, state.tail_checked) == (False, 1, False)
    assert (state.position, state.leader_epoch, state.source_epoch) == (20, 6, 7)
    assert (state.topic_id, state.log_start, state.probed_end) == (b"t" * 16, 3, 20)
    assert (state.newest, state.current_ms, state.rebuild) == ("n", 5, True)


@pytest.mark.parametrize(
    ("age_ms", "rebuilt"),
    [
        (-MARGIN_MS - 1, True),
        (-MARGIN_MS, False),
        (DAY_MS - MARGIN_MS - 1, False),
        (DAY_MS - MARGIN_MS, True),
    ],
)
def test_a_snapshot_that_is_old_or_from_a_time_to_come_is_rebuilt(age_ms, rebuilt):
    state = flow_in(Phase.READY)
    state.delete_retention_ms = DAY_MS
    state.snapshot_written(5 * DAY_MS)
    assert state.must_rebuild(5 * DAY_MS + age_ms) == rebuilt


@pytest.mark.parametrize(("spec", "checked"), [(archive_spec(), True), (None, False)])
def test_epochs_prove_the_tail_of_an_archive_alone(spec, checked):
    state = flow_in(Phase.READY, spec)
    state.compared(9, 8, is_proven=True)
    assert (state.source_epoch, state.leader_epoch, state.tail_checked) == (9, 8, checked)
    state.compared(9, -1, is_proven=False)
    assert not state.tail_checked


def test_only_its_module_writes_a_flows_phase():
    """Variables with a flow are named `state`."""
    fields = {"phase", "retry_at_ms", "failures", "tail_checked", "fenced", "in_flight_max"}
    fields |= {"position", "leader_epoch", "source_epoch", "source_end", "rebuild", "current_ms"}
    written = []
    root = Path(logmirror.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path.name == "flow_state.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
            for each in targets:
                written += [
                    f"{path.name}:{found.lineno}"
                    for found in ast.walk(each)
                    if isinstance(found, ast.Attribute)
                    and found.attr in fields
                    and ast.unparse(found.value).startswith(("state", "self._table.states["))
                ]
    assert written == []
