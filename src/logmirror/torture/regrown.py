"""The trial `regrown`: the source loses records that were copied, and others take their offsets.

An older copy of the source broker's disk is restored, and another producer writes until the log is
longer than before: a second history of the topic. No mirror may copy it behind the first one. The
embedded broker has no leader epochs, so a mirror notices it

- while it runs, as long as the source ends below its position, and
- at its next start, by comparing the last record that it copied; not with `offsets: translate`.

At the end the first history is restored, so that later trials continue it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.torture.feeder import RecordMaker, write_until
from logmirror.torture.processes import PARTITIONS, wait
from logmirror.torture.testbed import TOPIC

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logmirror.torture.processes import MirrorProcess
    from logmirror.torture.session import Session
    from logmirror.torture.testbed import Flow

DIE_MS: Final = 40_000
"""How long a trial waits for what a mirror must do."""

_SECOND: Final = 1_000_000_000
"""The first number of a record that only a second history has."""


def regrow(session: Session) -> None:
    """Run the trial."""
    testbed, feeder, source = session.testbed, session.feeder, session.testbed.source
    mirrors = [testbed.start()]
    mirrors[0].await_progress()
    feeder.pause()
    cut = _ends(session)
    source.kill()
    source.save_data()
    source.start()
    feeder.resume()
    has_passed = _await_positions(session, mirrors[0], beyond=cut)
    feeder.pause()
    if has_passed:
        end = _ends(session)
        _exchange(session)
        mirrors += _second_history(session, mirrors[0], end)
        _exchange(session)
    else:
        session.missed("the mirrors did not copy beyond the saved disk in time")
    source.drop_saved()
    feeder.resume()
    session.kill_and_record(*mirrors, expects_refusal=has_passed)


def _second_history(
    session: Session, running: MirrorProcess, end: Mapping[int, int]
) -> list[MirrorProcess]:
    """Write the second history, and let mirrors refuse it; returns those that were started."""
    wait(lambda: _have_refused(running, session.flows) or not running.is_alive, DIE_MS)
    if not _have_refused(running, session.flows):
        session.missed("not all mirrors noticed in time that the source was cut")
        return []
    size_max = session.chooser.choice((1, 8))  # 1: a batch begins at each position
    maker = RecordMaker(f"second {session.seed}", _SECOND * session.result.trials)
    address = session.testbed.source.address
    for partition, until in end.items():
        written = write_until(address, TOPIC, partition, until, maker, size_max)
        session.second[partition] |= written
    flows = [flow for flow in session.flows if flow.form != "translate"]
    if not flows:
        return []
    restarted = session.testbed.start(flows=flows)
    wait(  # progress is an anomaly, which the judge finds
        lambda: (
            _have_refused(restarted, flows) or restarted.has_progress() or not restarted.is_alive
        ),
        DIE_MS,
    )
    if not _have_refused(restarted, flows):
        session.missed("not all mirrors refused the second history in time")
    return [restarted]


def _have_refused(mirror: MirrorProcess, flows: Sequence[Flow]) -> bool:
    return mirror.refused() >= {flow.name for flow in flows}


def _await_positions(session: Session, mirror: MirrorProcess, beyond: Mapping[int, int]) -> bool:
    """Wait until each replica has records of the source behind these offsets."""
    pending = [(flow, partition) for flow in session.flows for partition in beyond]

    def is_over() -> bool:
        while pending and session.testbed.position(*pending[-1]) > beyond[pending[-1][1]]:
            pending.pop()
        return not (pending and mirror.is_alive)

    return wait(is_over, DIE_MS) and not pending


def _ends(session: Session) -> dict[int, int]:
    return {number: session.testbed.source_end(number) for number in range(PARTITIONS)}


def _exchange(session: Session) -> None:
    """Restart the source with the other one of its two disks."""
    source = session.testbed.source
    source.kill()
    source.exchange_data()
    source.start()
