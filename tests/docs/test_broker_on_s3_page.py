"""docs/broker-on-s3.md: its commands run as they are on the page, but for the port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kit.servers.machine import HOST, free_ports
from kit.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs" / "broker-on-s3.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TIMEOUT_S: Final = 60


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_commands_of_the_page_run(tmp_path):
    port, other = free_ports(2)
    with S3Server(tmp_path / "s3") as server:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BUCKET": server.new_bucket(),
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "AWS_REGION": "us-east-1",
        }
        folder = tmp_path / "user"
        folder.mkdir()
        log = tmp_path / "shell.log"
        with (
            log.open("wb") as output,
            subprocess.Popen(
                ["sh", "-e"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=folder,
            ) as shell,
        ):
            assert shell.stdin is not None
            started = Counter[int]()

            def wait_for_start(at: int) -> None:
                started[at] += 1
                line = f"\nlistening on {HOST}:{at}\n"
                wait_until(lambda: log.read_text().count(line) == started[at])

            for number, block in enumerate(BLOCKS):
                mark = tmp_path / f"done-{number}"
                commands = block.replace("9092", str(port)).replace("9093", str(other))
                shell.stdin.write(f"{commands}touch {mark}\n".encode())
                shell.stdin.flush()
                wait_until(mark.exists)
                if "$!" in block and "--standby" not in block:
                    wait_for_start(port)
                if "kill -9 $OWNER" in block:
                    wait_for_start(other)
            shell.stdin.write(b"wait $STANDBY\n")
            shell.stdin.close()
            code = shell.wait(TIMEOUT_S)
        assert code == 0, log.read_text()
    lines = (folder / "orders.txt").read_text().split()
    assert lines == [str(number) for number in range(1, 1001)]
    lines = (folder / "more.txt").read_text().split()
    assert lines == [str(number) for number in range(1, 2001)]
