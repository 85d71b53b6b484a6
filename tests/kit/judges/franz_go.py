"""franz-go, a client in Go: a service that writes, shares groups and copies in transactions."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from kit.servers.go import go_service


def run_service(bootstrap: str, topic: str, count: int, *, timeout_s: float = 100) -> Any:
    """Run the service to its end, and return what its clients saw.

    Args:
        bootstrap: `host:port`.
        topic: Name of the topic that it creates, and prefix of `<topic>-out` and of its groups,
            `<topic>-classic`, `<topic>-consumer` and `<topic>-copy`.
        count: Number of records, a multiple of 16.
        timeout_s: Seconds until it is killed and the test fails.
    """
    done = subprocess.run(
        [str(go_service("franz-go")), bootstrap, topic, str(count)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)
