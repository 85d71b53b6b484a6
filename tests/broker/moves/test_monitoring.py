"""What the monitoring port shows of moves: metrics while one is in progress, and the status.

Method: a limit holds a move while it is read. Sizes are compared with those of the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.moves.conftest import TwoDirs
from broker.moves.test_requests import BATCH, fill
from kit.judges.scrape import ask, status_of
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.machine import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RATE = 20_000


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[TwoDirs, int]]:
    [port] = free_ports(1)
    b = tmp_path / "b"
    with EmbeddedBroker(
        tmp_path / "broker", more_log_dirs=[str(b)], segment_bytes=20_000, monitoring_port=port
    ) as broker:
        yield TwoDirs(broker, broker.log_dir, b), port


def shown(port: int) -> dict[str, float]:
    """The metrics of moves, by their names without a prefix."""
    prefix = "logmirror_broker_move"
    return {
        sample.name.removeprefix(prefix): sample.value
        for family in text_string_to_metric_families(ask(port, "/metrics").text)
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.labels
    }


IDLE = {
    "s_in_progress": 0,
    "s_failed": 0,
    "_bytes_left": 0,
    "_bytes_copied_total": 0,
    "_swaps_total": 0,
    "_swap_seconds_count": 0,
    "_swap_seconds_sum": 0,
}


@pytest.mark.move("E99")
def test_e99_a_move_is_measured_from_its_beginning_to_its_swap(watched):
    dirs, port = watched
    dirs.create("t", 2)
    fill(dirs, "t")
    with dirs.client() as client:
        size = client.where("t")[str(dirs.a)].size_bytes
        assert shown(port) == IDLE
        assert status_of(port)["moves"] == []

        dirs.limit(0)  # one batch of all is copied, before the limit is reached
        assert set(client.move({dirs.b: {"t": (0, 1)}}).values()) == {0}
    # The other one is empty. A page is shown again for a second.
    wait_until(lambda: shown(port)["_swaps_total"] == 1, what=lambda: str(shown(port)))
    found = shown(port)
    assert found["s_in_progress"] == 1
    assert size >= found["_bytes_left"] >= size - len(BATCH) > 4 * RATE
    wait_until(lambda: len(status_of(port)["moves"]) == 1, what=lambda: str(status_of(port)))
    [status] = status_of(port)["moves"]
    assert size >= status.pop("left_bytes") >= size - len(BATCH)
    assert 6_000 >= status.pop("offset_lag") >= 5_900
    assert status == {
        "partition": "t-0",
        "from": str(dirs.a),
        "to": str(dirs.b),
        "state": "copying",
        "failure": None,
    }

    dirs.limit(RATE)
    seen = [found]

    def is_complete() -> bool:
        seen.append(shown(port))
        return seen[-1]["_swaps_total"] == 2

    wait_until(is_complete, what=lambda: f"the swaps: {seen[-1]}", timeout_s=60)
    left = [one["_bytes_left"] for one in seen]
    copied = [one["_bytes_copied_total"] for one in seen]
    assert len(set(left)) > 3
    assert left == sorted(left, reverse=True)
    assert copied == sorted(copied)
    last = seen[-1]
    assert last.items() >= {"s_failed": 0, "_bytes_left": 0, "_swap_seconds_count": 2}.items()
    assert last["_bytes_copied_total"] == size
    assert 0 < last["_swap_seconds_sum"] < 1
    wait_until(lambda: shown(port)["s_in_progress"] == 0, what=lambda: "the end")
    wait_until(lambda: status_of(port)["moves"] == [], what=lambda: str(status_of(port)))


def test_a_failed_move_is_counted_until_it_is_cancelled(watched):
    dirs, port = watched
    dirs.create("t")
    fill(dirs, "t")
    sealed = min(dirs.a.glob("t/0/[0-9]*"))
    content = bytearray(sealed.read_bytes())
    content[len(content) // 2] ^= 1
    sealed.write_bytes(content)

    with dirs.client() as client:
        assert client.move_one("t", dirs.b) == 0
        wait_until(lambda: shown(port)["s_failed"] == 1, what=lambda: str(shown(port)))
        found = shown(port)
        assert (found["s_in_progress"], found["_bytes_left"], found["_swaps_total"]) == (0, 0, 0)
        wait_until(
            lambda: [one["state"] for one in status_of(port)["moves"]] == ["failed"],
            what=lambda: str(status_of(port)),
        )
        [status] = status_of(port)["moves"]
        assert "record batch is damaged" in status["failure"]
        assert status["left_bytes"] > 0
        assert client.move_one("t", dirs.a) == 0
    wait_until(lambda: shown(port)["s_failed"] == 0, what=lambda: str(shown(port)))
    wait_until(lambda: status_of(port)["moves"] == [], what=lambda: str(status_of(port)))


def test_after_a_restart_what_was_copied_before_is_not_left(watched):
    dirs, port = watched
    dirs.create("t")
    fill(dirs, "t")

    def left() -> int:
        with dirs.client() as client:
            found = client.where("t")
        return found[str(dirs.a)].size_bytes - found[str(dirs.b)].size_bytes

    dirs.limit(RATE)
    with dirs.client() as client:
        assert client.move_one("t", dirs.b) == 0
        size = client.where("t")[str(dirs.a)].size_bytes
    wait_until(lambda: left() < size - 2 * RATE, what=lambda: str(left()))
    dirs.limit(0)
    before = left()
    dirs.broker.stop()
    dirs.broker.start()

    # The segment that was being copied begins again: it has 20,000 bytes at most.
    wait_until(lambda: -len(BATCH) <= left() - before <= 20_000, what=lambda: f"{left()}, {before}")
    wait_until(lambda: shown(port)["_bytes_left"] == left(), what=lambda: str(shown(port)))
    dirs.limit(None)
    dirs.wait_in("t", dirs.b)
