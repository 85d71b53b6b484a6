"""What the command line says of a wrong file and of a broker that is not there; who stamps records.

Nothing is copied but in the last test, which needs two clusters.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.clients import LOG_APPEND_TIME, Message, produce, rows_by_aiokafka
from kit.commands import logmirror, mirror, write_config
from kit.inline_run import config_text, mirror_to_cluster, run_now
from kit.machine import HOST, free_ports

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))

pytestmark = [pytest.mark.xdist_group("e2e-s3"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_is_taken(example):
    """CLI-01."""
    done = logmirror("validate", "-c", example)
    assert done.returncode == 0, done.stderr


# mirror-v3's list: CLI-02
def test_a_file_that_is_wrong_is_refused_with_its_line(tmp_path):
    config = write_config(tmp_path / "c.json", mirror("t", "h:1", tmp_path))
    sound = logmirror("validate", "-c", config)
    config.write_text(config.read_text().replace('"topic"', '"topik"'))
    wrong = logmirror("validate", "-c", config)

    assert sound.returncode == 0, sound.stderr
    assert wrong.returncode == 2
    lines = config.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "topik" in line)
    assert f"{number}:" in wrong.stderr
    assert "topik" in wrong.stderr


# mirror-v3's list: CLI-03, CLI-04
def test_a_broker_that_is_not_there_is_a_row_with_an_error(tmp_path):
    nobody = f"{HOST}:{free_ports(1)[0]}"
    config = write_config(tmp_path / "c.json", mirror("t", nobody, tmp_path, partition=0))

    told = logmirror("status", "-c", config, "--format", "json")

    assert told.returncode != 0, told.stdout
    (row,) = json.loads(told.stdout)
    assert (row["mirror"], row["partition"], row["lag"]) == ("parquet", 0, None)
    assert row["error"]["kind"] == "unavailable"
    assert nobody in row["error"]["message"]


# mirror-v3's list: E2E-11
def test_a_destination_that_stamps_gives_its_own_time(own_kafka, cli_broker, tmp_path, topic_name):
    own_kafka.create_topic(topic_name)
    messages = [Message(b"k", b"%d" % n, (), 1_700_000_000_000 + n) for n in range(20)]
    produce(own_kafka.bootstrap, topic_name, messages)
    config = tmp_path / "c.json"
    copied = mirror_to_cluster(
        topic_name, own_kafka.bootstrap, cli_broker.bootstrap, timestamp_mode="destination"
    )
    config.write_text(config_text(copied))

    done = run_now(config)

    assert done.returncode == 0, done.stderr
    theirs = rows_by_aiokafka(own_kafka.bootstrap, topic_name)
    ours = rows_by_aiokafka(cli_broker.bootstrap, topic_name)
    assert [row.value for row in ours] == [row.value for row in theirs]
    assert [row.offset for row in ours] == [row.offset for row in theirs]
    assert {row.timestamp_type for row in ours} == {LOG_APPEND_TIME}
    assert min(row.timestamp_ms for row in ours) > max(row.timestamp_ms for row in theirs)
