"""The trials: each starts mirrors, injects one fault, and kills the mirrors.

The next trial starts from what the previous one left behind.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.clock import SYSTEM_CLOCK, Chooser
from logmirror.simulation.matrix import simulated_points
from logmirror.torture.processes import PARTITIONS, wait
from logmirror.torture.regrown import DIE_MS, regrow
from logmirror.torture.testbed import TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.simulation.faults import Destination
    from logmirror.torture.session import Session
    from logmirror.torture.testbed import Flow

_FAULT_MS: Final = 1_500
_PAUSE_MS: Final = 4_000
_TINY_BYTES: Final = 700

_NEVER_REACHED: Final = (
    "compact.",  # no trial runs `compact`
    "head.",  # the source begins at offset 0
    "hole.joined",  # the destination lets mirrors write markers
)
_NTH_MAX: Final = {
    "translate.owned": PARTITIONS,  # once for each flow
    "hole.": 2,
    "plan.dispatch": 3,  # once for each follow window, the later of which last 10 s
    "commit.": 3,
}
"""How often a process reaches a failpoint in a trial, if that is seldom."""

_NTH: Final = 6


def failpoints_of(flows: Sequence[Flow], seed: int) -> list[str]:
    """Return the failpoints of a run in the order of its trials, each as `name#nth`."""
    chooser = Chooser(f"failpoints {seed}")
    names = sorted(
        {
            point
            for flow in flows
            for point in simulated_points(flow.destination, flow.form)
            if not point.startswith(_NEVER_REACHED)
        }
    )
    chooser.shuffle(names)
    return [f"{name}#{chooser.randint(1, _nth_max(name))}" for name in names]


def _nth_max(name: str) -> int:
    return next((n for prefix, n in _NTH_MAX.items() if name.startswith(prefix)), _NTH)


def _kill_at_point(session: Session) -> None:
    points = failpoints_of(session.flows, session.seed)
    point = points[session.result.trials % len(points)]
    session.feeder.transacts |= point.startswith("hole.")
    mirror = session.testbed.start(crash_at=point)
    if mirror.end(DIE_MS) is None:
        session.missed(f"{point} was not reached in time")
    session.kill_and_record(mirror)


def _kill_at_random(session: Session) -> None:
    mirror = session.testbed.start()
    if session.chooser.random() < 0.8:  # noqa: PLR2004  # else killed during its start
        mirror.await_progress()
    session.pass_time()
    session.kill_and_record(mirror)


def _stop(session: Session) -> None:
    mirror = session.testbed.start()
    mirror.await_progress()
    session.pass_time()
    mirror.signal(signal.SIGTERM)
    mirror.end()
    session.kill_and_record(mirror)


def _pause_mirror(session: Session) -> None:
    first = session.testbed.start()
    first.await_progress()
    session.pass_time()
    first.signal(signal.SIGSTOP)
    second = session.testbed.start()
    second.await_progress(_PAUSE_MS + DIE_MS)
    first.signal(signal.SIGCONT)
    session.pass_time()
    session.kill_and_record(first, second)


def _run_two(session: Session) -> None:
    both = (session.testbed.start(), session.testbed.start())
    for mirror in both:
        mirror.await_progress()
    session.pass_time()
    both[0].kill()
    session.pass_time()
    session.kill_and_record(*both)


def _restart_source(session: Session) -> None:
    source = session.testbed.source
    mirror = session.testbed.start()
    mirror.await_progress()
    source.kill()
    session.pass_time()
    source.start()
    session.pass_time()
    session.kill_and_record(mirror)


def _flip_bit(session: Session) -> None:
    """The broker must refuse the whole partition; otherwise the judge finds what is wrong."""
    source, chooser = session.testbed.source, session.chooser
    mirror = session.testbed.start()
    mirror.await_progress()
    source.kill()
    partition = chooser.randrange(PARTITIONS)
    end = max(session.feeder.acknowledged[partition], default=-1) + 1
    acknowledged = source.bytes_before(TOPIC, partition, end)
    path = source.open_segment(TOPIC, partition)
    if not acknowledged:
        session.missed("no record was acknowledged in time")
    else:
        whole = path.read_bytes()
        data = bytearray(whole)
        place = chooser.choice((chooser.randrange(acknowledged), acknowledged - 1))
        data[place] ^= 1 << chooser.randrange(8)
        path.write_bytes(data)
        source.start()
        SYSTEM_CLOCK.sleep_ms(_FAULT_MS)
        source.kill()
        path.write_bytes(whole)
    source.start()
    session.pass_time()
    session.kill_and_record(mirror)


def _disturb_network(session: Session) -> None:
    testbed, chooser = session.testbed, session.chooser
    mirror = testbed.start()
    mirror.await_progress()
    network = chooser.choice((testbed.network or testbed.s3_network, testbed.s3_network))
    kind = chooser.choice(("reset", "silence", "delay"))
    if kind == "reset":
        network.cut()
    network.is_silent = kind == "silence"
    network.delay_ms = 100 if kind == "delay" else 0
    SYSTEM_CLOCK.sleep_ms(_FAULT_MS)
    network.is_silent, network.delay_ms = False, 0
    session.pass_time()
    session.kill_and_record(mirror)


def _stall_neighbour(session: Session) -> None:
    """While one destination halts or drips, every flow to another one must make progress."""
    testbed = session.testbed
    mirror = testbed.start()
    mirror.await_progress()
    stalled: Destination = session.chooser.choice(("Kafka", "S3"))
    others = [flow for flow in session.flows if flow.destination != stalled]
    testbed.stall(stalled)
    try:
        before = {flow: testbed.extent(flow) for flow in others}

        def is_held_up(flow: Flow) -> bool:
            return testbed.extent(flow) == before[flow]

        wait(lambda: not any(map(is_held_up, others)) or not mirror.is_alive, DIE_MS)
        if mirror.is_alive:
            why = f"no progress within {DIE_MS} ms while {stalled} was stalled"
            session.stuck(filter(is_held_up, others), why)
    finally:
        testbed.resume()
    session.pass_time()
    session.kill_and_record(mirror)


def _refuse_writes(session: Session) -> None:
    mirror = session.testbed.start()
    mirror.await_progress()
    session.testbed.s3.faults.extend(["refused"] * 3)
    if not mirror.limit_files(_TINY_BYTES):
        session.result.left_out.append(
            "full disk: this system cannot limit the files of another process"
        )
    SYSTEM_CLOCK.sleep_ms(_FAULT_MS)
    if mirror.is_alive:
        mirror.limit_files(-1)
    session.pass_time()
    session.kill_and_record(mirror)


def _lose_responses(session: Session) -> None:
    _inject_into_s3(session, "lost-answer")


def _delay_responses(session: Session) -> None:
    _inject_into_s3(session, "late")


def _inject_into_s3(session: Session, fault: str) -> None:
    mirror = session.testbed.start()
    mirror.await_progress()
    for _ in range(4):
        session.testbed.s3.faults.append(fault)
        session.pass_time()
    session.kill_and_record(mirror)


class Trial(NamedTuple):
    """A kind of trial."""

    meaning: str
    """What happens, in words."""

    run: Callable[[Session], None]


TRIALS: Final = {
    "kill": Trial("kill -9 at a failpoint", _kill_at_point),
    "random-kill": Trial("kill -9 at a random moment", _kill_at_random),
    "pause": Trial("SIGSTOP until another mirror makes progress, then SIGCONT", _pause_mirror),
    "two-writers": Trial("two mirrors run at once; one is killed", _run_two),
    "stop": Trial("SIGTERM", _stop),
    "source-down": Trial("the source broker is killed (kill -9) and restarted", _restart_source),
    "flip": Trial("a bit of the source broker's log is flipped, and later flipped back", _flip_bit),
    "regrown": Trial(
        "the source loses records that were copied, and others are written at their offsets; "
        "later the lost ones are restored",
        regrow,
    ),
    "network": Trial(
        "connections to the source or the S3 server are reset, blocked or delayed",
        _disturb_network,
    ),
    "refused": Trial(
        "the S3 server refuses writes (503), and no file can grow (full disk)", _refuse_writes
    ),
    "lost-answer": Trial(
        "the S3 server performs a write, and the response is lost", _lose_responses
    ),
    "neighbour": Trial(
        "one destination halts (SIGSTOP) or drips; the others must make progress",
        _stall_neighbour,
    ),
    "late": Trial(
        "the S3 server performs a write 2 s after it closed the connection", _delay_responses
    ),
}
"""The kinds of trials, by the names of their faults in `--faults`."""
