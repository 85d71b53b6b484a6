"""Faults at a source: the mirror stops with the right kind of error and keeps what it has copied.

Against Apache Kafka. Exit codes: 2 usage, 69 position (the source or the archive does not match the
chain).
"""

import pytest
from confluent_kafka.admin import AdminClient

from kit.judges.clients import Message, odd_messages, produce
from kit.judges.truth import Source, object_names
from kit.runs.cleaning import delete_records
from kit.runs.commands import FORMATS, logmirror, logmirror_json, mirror, write_config
from kit.runs.inline_run import InlineRun, run_now

pytestmark = [pytest.mark.xdist_group("e2e-kafka"), pytest.mark.timeout(900)]


def configure(broker, root, topic, **limits):
    mirrors = [mirror(topic, broker.bootstrap, root, form=f, **limits) for f in FORMATS]
    return write_config(root / "config.json", *mirrors)


def objects(root):
    folders = {form: root / form / "0" for form in FORMATS}
    return {form: object_names(path) if path.exists() else [] for form, path in folders.items()}


def test_a_missing_topic_is_a_usage_error(own_kafka, tmp_path):
    config = configure(own_kafka, tmp_path, "no-such-topic")

    ran = run_now(config)
    status = logmirror("status", "-c", config, "--format", "json")

    assert ran.returncode == 2, ran.stderr
    assert "error (usage): topic does not exist" in ran.stderr
    assert "topic: no-such-topic" in ran.stderr
    assert "hint: " in ran.stderr
    assert status.returncode == 1
    assert not any(objects(tmp_path).values())
    admin = AdminClient({"bootstrap.servers": own_kafka.bootstrap})
    assert "no-such-topic" not in admin.list_topics(timeout=10).topics


def test_a_missing_partition_is_a_usage_error(own_kafka, tmp_path):
    topic = own_kafka.create_topic("one-partition")
    one = mirror(topic, own_kafka.bootstrap, tmp_path, partition=7)
    config = write_config(tmp_path / "config.json", one)

    ran = run_now(config)

    assert ran.returncode == 2, ran.stderr
    assert "error (usage): the topic has no such partition" in ran.stderr
    assert "missing: [7]" in ran.stderr


def test_a_recreated_topic_does_not_continue_the_old_archive(own_kafka, tmp_path):
    topic = own_kafka.create_topic("again")
    produce(own_kafka.bootstrap, topic, odd_messages(30, seed=1))
    config = configure(own_kafka, tmp_path, topic)
    first = run_now(config)
    before = objects(tmp_path)
    own_kafka.delete_topic(topic)
    own_kafka.create_topic(topic)
    produce(own_kafka.bootstrap, topic, odd_messages(60, seed=2))

    second = run_now(config)
    status = logmirror("status", "-c", config, "--format", "json")

    assert first.returncode == 0, first.stderr
    assert second.returncode == 69, second.stderr
    assert "error (position): the topic was deleted and created again" in second.stderr
    assert "reason: SourceRecreated" in second.stderr
    assert "position: 30" in second.stderr
    assert "hint: " in second.stderr
    assert status.returncode == 1
    assert objects(tmp_path) == before
    assert logmirror("verify", "--deep", "-c", config).returncode == 0


def test_recreating_a_topic_stops_a_running_service(own_kafka, tmp_path):
    topic = own_kafka.create_topic("again-while-running")
    produce(own_kafka.bootstrap, topic, odd_messages(30, seed=1))
    config = configure(own_kafka, tmp_path, topic, max_time_ms=200)

    with InlineRun(config, folder=tmp_path) as run:
        for form in FORMATS:
            run.wait_for(f" flushed mirror={form} ")
        before = objects(tmp_path)
        own_kafka.delete_topic(topic)
        own_kafka.create_topic(topic)
        produce(own_kafka.bootstrap, topic, odd_messages(60, seed=2))
        exit_code = run.wait()
        run.wait_until_nothing_is_left()

    assert exit_code == 69, run.text
    assert "deleted and created again" in run.text
    assert objects(tmp_path) == before


def test_records_deleted_before_they_were_copied_stop_the_mirror(own_kafka, tmp_path):
    topic = own_kafka.create_topic("trimmed")
    produce(own_kafka.bootstrap, topic, odd_messages(50, seed=1))
    config = configure(own_kafka, tmp_path, topic)
    first = run_now(config)
    produce(own_kafka.bootstrap, topic, odd_messages(50, seed=2))
    delete_records(own_kafka, topic, 80)
    before = objects(tmp_path)

    second = run_now(config)

    assert first.returncode == 0, first.stderr
    assert second.returncode == 69, second.stderr
    assert "error (position): the source no longer has the next record" in second.stderr
    assert "position: 50" in second.stderr
    assert "log_start: 80" in second.stderr
    assert "chain-start" in second.stderr
    assert objects(tmp_path) == before
    for report in logmirror_json("verify", "--against-source", "-c", config):
        assert (report["gone_at_source"], report["problems"]) == (report["objects"], [])


@pytest.mark.parametrize("chain_start", ["earliest", 8])
@pytest.mark.mirror_v3("E2E-13")
def test_r8_append_mode_refuses_a_log_without_its_head_unless_the_chain_declares_its_start(
    own_kafka, tmp_path, chain_start
):
    topic = own_kafka.create_topic(f"trimmed-early-{chain_start}")
    produce(own_kafka.bootstrap, topic, odd_messages(50, seed=1))
    delete_records(own_kafka, topic, 8)
    strict = configure(own_kafka, tmp_path, topic)

    refused = run_now(strict)
    left = objects(tmp_path)
    earliest = [
        mirror(topic, own_kafka.bootstrap, tmp_path, form=f, chain_start=chain_start)
        for f in FORMATS
    ]
    config = write_config(tmp_path / "earliest.json", *earliest)
    copied = run_now(config)

    assert refused.returncode == 69, refused.stderr
    assert "reason: SourceTrimmed" in refused.stderr
    assert "position: 0" in refused.stderr
    assert "log_start: 8" in refused.stderr
    assert "chain-start" in refused.stderr
    assert not any(left.values())
    assert copied.returncode == 0, copied.stderr
    source = Source(own_kafka.bootstrap, topic)
    assert source.bounds(0) == (8, 50)
    for form in FORMATS:
        assert source.anomalies(tmp_path, form) == [], form


def test_a_legal_batch_above_the_limit_stops_with_its_offset_until_the_limit_is_raised(
    own_kafka, tmp_path
):
    """16 MiB in a few kilobytes of zstd: Kafka limits what was compressed."""
    topic = own_kafka.create_topic("bomb")
    produce(own_kafka.bootstrap, topic, odd_messages(30, seed=1))
    config = {"compression.type": "zstd", "message.max.bytes": 100_000_000}
    produce(own_kafka.bootstrap, topic, [Message(b"k", bytes(16 << 20))], config=config)
    mirrors = [
        mirror(topic, own_kafka.bootstrap, tmp_path, form=form, name=form) for form in FORMATS
    ]
    rows = [one for one in mirrors if one["name"] != "native"]
    small = {"max-batch-unpacked-bytes": "8MiB"}
    first = write_config(tmp_path / "first.json", *rows, limits=small)
    second = write_config(tmp_path / "second.json", *mirrors, limits=small, on_fatal="isolate")
    third = write_config(tmp_path / "third.json", *mirrors, limits={})

    refused, copied, raised = run_now(first), run_now(second), run_now(third)

    assert refused.returncode == 2, refused.stderr
    message = "a batch is larger than `limits.max-batch-unpacked-bytes` when it is decompressed"
    assert f"error (usage): {message}" in refused.stderr
    for fact in (f"topic: {topic}", "partition: 0", "offset: 30", f"limit_bytes: {8 << 20}"):
        assert fact in refused.stderr
    assert copied.returncode == 2, copied.stderr
    assert raised.returncode == 0, raised.stderr
    assert {form: names[-1][21:41] for form, names in objects(tmp_path).items()} == dict.fromkeys(
        FORMATS, f"{30:020d}"
    )
    assert logmirror("verify", "--deep", "-c", third).returncode == 0
    assert logmirror("verify", "--deep", "-c", second).returncode != 0, "the limit holds there too"
