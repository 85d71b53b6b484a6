"""A stop request, from a signal or the caller, and what it does to work in progress."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from logmirror.stopping import StoppedError, StopRequest


def test_work_is_done_where_no_stop_is_requested():
    assert StopRequest().unless_stopped(lambda: 7) == 7


def test_an_error_of_the_work_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        StopRequest().unless_stopped(lambda: 1 // 0)


def test_no_work_begins_after_the_request():
    request = StopRequest()
    request.request()
    with pytest.raises(StoppedError):
        request.unless_stopped(lambda: pytest.fail("it began"))


@pytest.mark.parametrize("by", ["request", "event"])
def test_a_stop_does_not_wait_for_work_that_cannot_be_ended(by):
    event, began, release = threading.Event(), threading.Event(), threading.Event()
    request = StopRequest(event)

    def work():
        began.set()
        release.wait(60)

    def stop():
        began.wait(60)
        event.set() if by == "event" else request.request()

    threading.Thread(target=stop).start()
    with pytest.raises(StoppedError):
        request.unless_stopped(work)
    assert request.requested
    assert not release.is_set()
    release.set()


def test_work_that_can_be_aborted_has_ended_before_the_stop_is_raised():
    request, began, aborted = StopRequest(), threading.Event(), threading.Event()
    ended = []

    def work():
        began.set()
        aborted.wait(60)
        ended.append(True)

    def stop():
        began.wait(60)
        request.request()

    threading.Thread(target=stop).start()
    with pytest.raises(StoppedError):
        request.unless_stopped(work, aborted.set)
    assert ended == [True]


def test_an_interrupted_thread_aborts_the_work_too():
    aborted = threading.Event()
    main = threading.get_ident()

    def work():
        signal.pthread_kill(main, signal.SIGINT)
        aborted.wait(60)

    with pytest.raises(KeyboardInterrupt):
        StopRequest().unless_stopped(work, aborted.set)
    assert aborted.is_set()


def test_a_callback_is_called_for_a_stop_before_and_within_its_block_only():
    calls = []
    request = StopRequest()
    with request.on_stop(lambda: calls.append("first")):
        assert calls == []
        request.request()
        assert calls == ["first"]
    with request.on_stop(lambda: calls.append("second")):
        assert calls == ["first", "second"]
    request.request()
    assert calls == ["first", "second"]


def test_a_callback_is_called_when_the_callers_event_is_set():
    event, called = threading.Event(), threading.Event()
    with StopRequest(event).on_stop(called.set):
        event.set()
        assert called.wait(60)


PROGRAM = """
import os, signal, sys
from logmirror.stopping import StopRequest, handle_signals, hold_signals
with hold_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    request = StopRequest()
    print("loaded", request.requested)
    with handle_signals(request):
        print("handled", request.requested, flush=True)
        if "again" in sys.argv:
            os.kill(os.getpid(), signal.SIGINT)
        print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "lines"),
    [
        ([], 0, ["loaded False", "handled True", "ended"]),
        (["again"], 128 + signal.SIGINT, ["loaded False", "handled True"]),
    ],
)
def test_a_signal_during_loading_is_the_first_one_later(arguments, code, lines):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (code, lines, "")


def test_run_holds_signals_before_it_loads_its_commands(tmp_path):
    """The commands are replaced by a module that waits for the signal: nothing else is loaded."""
    package = tmp_path / "typer.py"
    package.write_text(
        "import signal\n"
        "print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), flush=True)\n"
        "raise SystemExit(3)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = {
        command: subprocess.run(
            [sys.executable, "-m", "logmirror", command],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for command in ("run", "status")
    }
    assert [one.returncode for one in done.values()] == [3, 3]
    assert "SIGTERM" in done["run"].stdout
    assert "SIGINT" in done["run"].stdout
    assert done["status"].stdout == "[]\n"
