"""Liveness and readiness of lanes: a stalled slice is named, and other lanes are not restarted."""

from kit.fakes.scripted import SteppingClock
from logmirror.mirror.health import LIVE_MS, STALLED_MS, STUCK_MS, LaneProgress, StatusBoard
from logmirror.mirror.ports import FlowId


def lane(clock, name):
    return LaneProgress([(name, ["d"])], clock)


def test_a_slice_that_stalls_makes_its_mirror_not_ready_and_then_the_process_not_live():
    """A slice without progress is named. It ends the process only if a restart is its last hope."""
    clock = SteppingClock()
    board = StatusBoard(["stalled", "busy"], clock)
    stalled, busy = lane(clock, "stalled"), lane(clock, "busy")
    board.lanes_begin([stalled, busy])
    for name in ("stalled", "busy"):
        board.mirror_opened(name, destinations=["d"])
    flow = FlowId(mirror="stalled", destination="d", topic="t", partition=7)
    with stalled.running([flow]):
        stalled.beat()
        clock.ms += STALLED_MS
        busy.made()
        assert board.not_ready() == []
        clock.ms += 1000
        (line,) = board.not_ready()
        assert "mirror=stalled state=waiting" in line
        assert f"no progress for 31 s: slices of {flow}" in line
        assert board.not_live() == []
        clock.ms += STUCK_MS
        busy.made()
        (reason,) = board.not_live()
        assert str(flow) in reason
        stalled.beat()
        assert (board.not_live(), board.not_ready()) == ([], [])


def test_slices_that_cannot_report_progress_are_stalled_later():
    clock = SteppingClock()
    unconnected = lane(clock, "m")
    flow = FlowId(mirror="m", destination="d", topic="t", partition=0)
    with unconnected.running([flow]):
        clock.ms += LIVE_MS
        assert not unconnected.stalled_ms
        clock.ms += 1
        assert unconnected.stalled_ms


def test_a_process_whose_lanes_all_wait_is_not_live():
    clock = SteppingClock()
    board = StatusBoard(["a", "b"], clock)
    lanes = [lane(clock, name) for name in "ab"]
    board.lanes_begin(lanes)
    clock.ms += LIVE_MS + 1
    assert "the process has made no progress" in board.not_live()[0]
    lanes[0].is_over = True
    lanes[1].made()
    clock.ms += 1000
    assert board.not_live() == []
