"""A real Prometheus on loopback, and its parser.

with Prometheus(folder, port_of_logmirror, rules) as prometheus:
    prometheus.query('up{job="logmirror"}')
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any, Final, Self

from kit.servers.machine import HOST, Process, cache_folder, free_ports

if TYPE_CHECKING:
    from pathlib import Path

_START_TIMEOUT_S: Final = 180


def program(name: str) -> str:
    """`prometheus` or `promtool`: what `scripts/setup.sh tests` unpacked, or the machine's."""
    unpacked = cache_folder() / "prometheus" / "usr" / "bin" / name
    found = str(unpacked) if unpacked.exists() else shutil.which(name)
    if found is None:
        message = f"the tests need the program {name!r}: run `make test`"
        raise RuntimeError(message)
    return found


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool to its end."""
    return subprocess.run(
        [program("promtool"), *map(str, arguments)],
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


class Prometheus:
    """The server; use it in a `with`. It scrapes one target, as the job `logmirror`, every second.

    Args:
        folder: Its directory.
        target: Port of the target.
        rules: A file of rules.
    """

    def __init__(self, folder: Path, target: int, rules: Path) -> None:
        self._folder, self._port = folder, free_ports(1)[0]
        self._process: Process | None = None
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        job = {"job_name": "logmirror", "static_configs": [{"targets": [f"{HOST}:{target}"]}]}
        config = {"global": every, "rule_files": [str(rules)], "scrape_configs": [job]}
        folder.mkdir()
        self._config = folder / "prometheus.yml"
        self._config.write_text(json.dumps(config))

    def __enter__(self) -> Self:
        command = [program("prometheus"), f"--config.file={self._config}"]
        command += [f"--web.listen-address={HOST}:{self._port}"]
        command += [f"--storage.tsdb.path={self._folder / 'data'}", "--log.level=warn"]
        log = self._folder / "log"
        self._process = Process(command, log=log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self._get("/-/ready")
            except OSError:
                assert self._process.alive, self._process.tail()
                assert time.monotonic() < deadline, self._process.tail()
                time.sleep(0.05)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.end(kill=True)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression; fails with Prometheus's error message."""
        return list(self.api("query", query=expression)["result"])

    def formatted(self, expression: str) -> str:
        """Return an expression as Prometheus formats it."""
        return str(self.api("format_query", query=expression))

    def api(self, path: str, **parameters: str) -> Any:
        """Send a request to its HTTP API."""
        question = urllib.parse.urlencode(parameters)
        try:
            response = json.loads(self._get(f"/api/v1/{path}?{question}"))
        except urllib.error.HTTPError as error:
            with error:
                message = f"{parameters}: {error.read().decode()}"
            raise AssertionError(message) from error
        assert response["status"] == "success", response
        return response["data"]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{HOST}:{self._port}{path}", timeout=30) as response:
            return bytes(response.read())


_TOKEN: Final = re.compile(
    r'"(?:\\.|[^"\\])*"|\[[^\]]*\]|[a-zA-Z_:][a-zA-Z0-9_:]*|[{}()]|[^\s\w"{}()\[]+|\d\w*|\s+'
)
_LISTS: Final = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS: Final = {"and", "or", "unless", "bool", "offset", "atan2", "inf", "nan"}


def names(formatted: str) -> tuple[set[str], set[str]]:
    """Return the metrics and the labels in an expression.

    Args:
        formatted: Output of `Prometheus.formatted`, so it is valid PromQL.
    """
    tokens = [token for token in _TOKEN.findall(formatted) if not token.isspace()]
    metrics: set[str] = set()
    labels: set[str] = set()
    in_braces = in_list = False
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if token == "{":
            in_braces = True
        elif token == "}":
            in_braces = False
        elif token == ")":
            in_list = False
        elif token in _LISTS:
            in_list = following == "("
        elif re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", token):
            if in_braces or in_list:
                labels.add(token)
            elif following not in {"(", *_LISTS} and token not in (_WORDS | _LISTS):
                metrics.add(token)  # what is left out: a function, or an aggregation `by` labels
    return metrics, labels
