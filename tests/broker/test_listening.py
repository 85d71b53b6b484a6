"""Goal: a broker that other hosts can reach warns that its clients are not authenticated."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kit.runs.commands import wait_until
from kit.servers import embedded
from kit.servers.machine import Process

_SCRIPT = Path(embedded.__file__).parent / "run_broker.py"


@pytest.mark.parametrize(
    ("host", "warns"),
    [("0.0.0.0", True), ("127.0.0.1", False)],
)
def test_a_broker_beyond_loopback_warns(tmp_path, host, warns):
    ready = tmp_path / "ready"
    options = {"log_dir": str(tmp_path / "data"), "host": host, "port": 0, "ready": str(ready)}
    log = tmp_path / "log"
    process = Process([sys.executable, "-P", str(_SCRIPT), json.dumps(options)], log=log)
    try:
        wait_until(ready.exists, what=log.read_text, timeout_s=60)
    finally:
        process.end()

    text = log.read_text()
    assert ("WARNING" in text and "clients are not authenticated" in text) == warns
