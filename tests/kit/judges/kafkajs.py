"""KafkaJS, from npm: a service that writes, and copies in transactions of a group."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from kit.servers.machine import cache_folder, program

_VERSION: Final = "2.2.4"
_SERVICE: Final = Path(__file__).with_name("kafkajs_service.js")


def run_service(bootstrap: str, topic: str, count: int, *, timeout_s: float = 120) -> Any:
    """Run the service to its end, and return what its admin client saw.

    Args:
        bootstrap: `host:port`.
        topic: Name of the topic that it creates, of its group, and of `<topic>-out`.
        count: Number of records, a multiple of 50.
        timeout_s: Seconds until it is killed and the test fails.
    """
    done = subprocess.run(
        [program("node"), str(_SERVICE), bootstrap, topic, str(count)],
        env={**os.environ, "NODE_PATH": str(_modules())},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _modules() -> Path:
    """Return the folder of the package; the first use on a machine downloads it."""
    home = cache_folder() / f"kafkajs-{_VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
        if not (home / "complete").exists():
            options = ["--prefix", str(home), "--no-audit", "--no-fund", "--no-save"]
            command = [program("npm"), "install", *options, f"kafkajs@{_VERSION}"]
            subprocess.run(command, check=True, capture_output=True, timeout=240)
            (home / "complete").touch()
    return home / "node_modules"
