"""Pages of docs/ that promise to work by copy and paste: their commands run as they stand.

But for `logmirror run`, which does without Spark except at night (`make nightly`): the README's
commands, which `tests/docs/test_readme.py` runs, are where a push starts it as a user does.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from kit.runs.commands import QUIET
from kit.runs.inline_run import python_path
from kit.servers.machine import HOST, free_ports, program
from kit.tiers import NIGHTLY

DOCS = Path(__file__).parents[2] / "docs"
LISTENING = "until kcat -L -b 127.0.0.1:{port} > listening 2>&1; do sleep 0.1; done\n"
BLOCK = re.compile(r"```(sh|yaml)\n(.*?)```", re.DOTALL)


def run_section(page: str, folder: Path, config: str) -> subprocess.CompletedProcess[str]:
    """Run the commands of a page's section "Try it" in a folder; YAML is saved as `config`.

    The first block starts brokers, which are waited for. Ports are replaced by free ones.
    """
    section = (DOCS / page).read_text().partition("## Try it")[2].partition("\n## ")[0]
    steps = [
        f"cat > {config} <<'YAML'\n{text}YAML\n" if kind == "yaml" else text
        for kind, text in BLOCK.findall(section)
    ]
    ports = [port for port in (9092, 9093) if f"127.0.0.1:{port}" in section]
    steps[1:1] = [LISTENING.format(port=port) for port in ports]
    script = "set -e\ntrap 'kill $(jobs -p)' EXIT\n" + "".join(steps)
    for port in ports:
        script = script.replace(f"127.0.0.1:{port}", f"{HOST}:{free_ports(1)[0]}")
    python = shlex.quote(sys.executable)
    if not NIGHTLY:  # a start of Spark costs as much as many other tests
        script = re.sub(r"\blogmirror run ", f"{python} -m kit.runs.inline_run run ", script)
    script = re.sub(r"\blogmirror ", f"{python} -m logmirror ", script)
    script = re.sub(r"\bkcat ", f"{shlex.quote(program('kcat'))} ", script)
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, **QUIET, "NO_COLOR": "1", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.gate("a page by copy and paste; the README runs in `make test`")
@pytest.mark.timeout(600)
def test_mirror_a_cluster_works_by_copy_and_paste(tmp_path: Path) -> None:
    done = run_section("mirror-a-cluster.md", tmp_path, "standby.yaml")

    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = done.stdout.splitlines()[-2:]
    assert ours == theirs
    assert hashlib.sha256().hexdigest() not in ours  # of nothing
    assert "100000" in done.stdout  # records that were proven


@pytest.mark.gate("a page by copy and paste; the README runs in `make test`")
@pytest.mark.timeout(600)
def test_compacted_topics_works_by_copy_and_paste(tmp_path: Path) -> None:
    done = run_section("compacted-topics.md", tmp_path, "prices.yaml")

    assert done.returncode == 0, done.stdout + done.stderr
    page = (DOCS / "compacted-topics.md").read_text()
    query = page.partition("```sql\n")[2].partition("```")[0]
    names = [line.strip() for line in page.splitlines() if line.startswith("    0000")]
    assert [line for line in done.stdout.splitlines() if line.startswith("0000")] == names
    sql, _, printed = query.partition(";\n")
    found = duckdb.execute(sql.replace("'archive/", f"'{tmp_path}/archive/")).fetchall()
    rows = [line.removeprefix("--").split() for line in printed.splitlines()]
    assert [[str(value) for value in row] for row in found] == rows
