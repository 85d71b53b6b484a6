"""Timestamps: a destination topic with LogAppendTime has its own time."""

import pytest

from kit.judges.clients import LOG_APPEND_TIME, Message, produce, rows_by_aiokafka
from kit.runs.inline_run import config_text, mirror_to_cluster, run_now

pytestmark = [pytest.mark.xdist_group("e2e-s3"), pytest.mark.timeout(600)]


@pytest.mark.mirror_v3("E2E-11")
def test_log_append_time_at_the_destination(own_kafka, cli_broker, tmp_path, topic_name):
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
