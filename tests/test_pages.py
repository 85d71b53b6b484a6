"""Pages of docs/ that promise to work by copy and paste: their commands run as they stand."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kit.commands import QUIET
from kit.machine import HOST, free_ports, program

DOCS = Path(__file__).parent.parent / "docs"
LISTENING = "".join(
    f"until kcat -L -b 127.0.0.1:{port} > listening 2>&1; do sleep 0.1; done\n"
    for port in (9092, 9093)
)
BLOCK = re.compile(r"```(sh|yaml)\n(.*?)```", re.DOTALL)


@pytest.mark.timeout(300)
def test_mirror_a_cluster_works_by_copy_and_paste(tmp_path: Path) -> None:
    page = (DOCS / "mirror-a-cluster.md").read_text()
    section = page.partition("## Try it")[2].partition("\n## ")[0]
    blocks = [(kind, text) for kind, text in BLOCK.findall(section)]
    assert [kind for kind, _ in blocks] == ["sh", "sh", "yaml", "sh", "sh"]
    steps = [
        f"cat > standby.yaml <<'END'\n{text}END\n" if kind == "yaml" else text
        for kind, text in blocks
    ]
    steps.insert(1, LISTENING)
    script = "set -e\ntrap 'kill $(jobs -p)' EXIT\n" + "".join(steps)
    for port in (9092, 9093):
        script = script.replace(f"127.0.0.1:{port}", f"{HOST}:{free_ports(1)[0]}")
    script = re.sub(r"\blogmirror ", f"{shlex.quote(sys.executable)} -m logmirror ", script)
    script = re.sub(r"\bkcat ", f"{shlex.quote(program('kcat'))} ", script)

    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **QUIET, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = done.stdout.splitlines()[-2:]
    assert ours == theirs
    assert hashlib.sha256().hexdigest() not in ours  # of nothing
    assert "100000" in done.stdout  # records that were proven
