"""The driver of a run loads no compiler: its workers do, and a take-over from MirrorMaker does.

Method: the program runs as its user starts it, and prints the names of its modules when it ends.
Sizes are asserted in the bench only.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kit.judges.clients import odd_messages, produce, rows_by_librdkafka
from kit.runs.commands import logmirror, mirror, write_config
from kit.runs.inline_run import mirror_to_cluster
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

PROGRAM = """
import atexit, json, sys
from logmirror.cli.main import main
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), flush=True))
main()
"""
COMPILER = {"llvmlite", "numba"}
PACKAGES = COMPILER | {"boto3", "numpy", "pandas", "pyarrow", "pyspark"}
OFFSETS = ("preserve", "translate")
RECORDS = 20


def packages(names):
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("command", ["acls", "preflight", "run", "status"])
def test_the_modules_of_a_command_load_no_heavy_package(command):
    program = f"import logmirror.app.{command}, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert packages(done.stdout.split()) & PACKAGES == set()


def test_the_driver_of_a_run_loads_no_compiler(tmp_path, topic_name):
    with EmbeddedBroker(tmp_path / "a") as source, EmbeddedBroker(tmp_path / "b") as target:
        create_topic(source.bootstrap, topic_name, 1, {})
        produce(source.bootstrap, topic_name, odd_messages(RECORDS, seed=1))
        config = write_config(
            tmp_path / "config.json",
            mirror(topic_name, source.bootstrap, tmp_path / "lake"),
            *(
                mirror_to_cluster(
                    topic_name, source.bootstrap, target.bootstrap, name=one, topic=one, offsets=one
                )
                for one in OFFSETS
            ),
        )

        done = logmirror(
            "run", "--until-now", "-c", config, program=(sys.executable, "-c", PROGRAM)
        )

        assert done.returncode == 0, done.stderr
        loaded = packages(json.loads(done.stdout.splitlines()[-1]))
        assert "pyspark" in loaded
        assert loaded & COMPILER == set()
        for topic in OFFSETS:
            assert len([*rows_by_librdkafka(target.bootstrap, topic)]) == RECORDS
    assert [*(tmp_path / "lake").rglob("*.parquet")]
