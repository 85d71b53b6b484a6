"""The broker keeps the memory of the pieces that it sends, and its collector runs rarely.

Method, for pages: a broker that has just started serves an archive, and the kernel counts its page
faults.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from confluent_kafka import Producer

from kit.judges.clients import kcat
from kit.runs.commands import mirror, write_config
from kit.runs.inline_run import run_now
from kit.servers.mounted import MountingBroker

RECORDS, RECORD_BYTES, PAGE_BYTES = 4_000, 16_384, 4_096
TIMEOUT_S = 60


def test_pieces_for_consumers_take_no_new_pages(tmp_path):
    archive = tmp_path / "archive"
    with MountingBroker(tmp_path / "source", options=("--topic", "t:1")) as bootstrap:
        producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
        for number in range(RECORDS):
            producer.produce("t", number.to_bytes(4, "big") * (RECORD_BYTES // 4))
            producer.poll(0)
        assert producer.flush(TIMEOUT_S) == 0
        one = mirror("t", bootstrap, archive, form="native", max_bytes=8 << 20, name="t")
        run = run_now(write_config(tmp_path / "mirror.json", one))
        assert run.returncode == 0, run.stderr
    broker = MountingBroker(tmp_path / "log", archive)
    with broker as bootstrap:
        taken = [faults_of(broker.pid, lambda: read(bootstrap)) for _ in range(3)]
    pages = RECORDS * RECORD_BYTES // PAGE_BYTES
    assert max(taken) < pages // 4, (taken, pages)


def test_the_garbage_collector_leaves_out_what_a_start_has_made():
    code = (
        "import gc; from logmirror.broker import memory; before = gc.get_threshold()[0];"
        "memory.keep_memory(); print(gc.get_freeze_count() > 0, gc.get_threshold()[0] > before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "True"]


def read(bootstrap):
    found = kcat("-C", "-b", bootstrap, "-t", "t", "-q", "-e", "-o", "beginning", "-f", "%o\n")
    assert len(found.split()) == RECORDS


def faults_of(pid, work):
    """Return how many pages a process takes without reading from a disk (proc(5): minflt)."""
    before = minor_faults(pid)
    work()
    return minor_faults(pid) - before


def minor_faults(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])
