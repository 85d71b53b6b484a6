"""What operators see of a run: its port, its log, each flush with its reason (R9 to R12).

Method: real runs without Spark against the embedded broker, in processes of their own where port
and exit code are what is asked for, else in a thread of this one; metrics are read by Prometheus's
parser, positions by a listing of the folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import threading
from datetime import UTC, datetime, timedelta

import pytest

from kit.clients import Message, produce, produce_transactions
from kit.commands import BrokerCommand, mirror, wait_until, write_config
from kit.copies import forget_connections
from kit.inline_run import InlineRun, InlineRunner, mirror_to_cluster
from kit.machine import free_ports
from kit.scrape import ask, samples, scrape, status_of
from logmirror import wiring
from logmirror.clock import SYSTEM_CLOCK
from logmirror.config import load
from logmirror.errors import LogmirrorError
from logmirror.metrics import Recorder
from logmirror.mirror.observer import Observer

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(300)]


def some(count):
    return [Message(b"k%d" % n, b"value %d" % n, (), 1_700_000_000_000 + n) for n in range(count)]


@contextlib.contextmanager
def running(config, *, heartbeat_ms=0):
    """The loop in a thread; yields what it recorded and a list that gets the error it ended with."""
    recorder, errors = Recorder(), []
    with contextlib.ExitStack() as stack:
        specs = wiring.mirror_specs(load(config))
        names = [spec.name for spec in specs]
        observer = Observer(names, recorder, SYSTEM_CLOCK, heartbeat_ms=heartbeat_ms)
        runner = stack.enter_context(InlineRunner())
        service = wiring.build_service(specs, runner, stack, observer)

        def run():
            try:
                service.run()
            except LogmirrorError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield recorder, errors
        finally:
            service.stop()
            thread.join()


def of_metric(recorder, name):
    return {labels: n for (of, labels), n in samples(recorder).items() if of == name}


def told(caplog, name):
    return [r.facts for r in caplog.records if r.getMessage() == name]


def durable_position(folder):
    """By the names of objects alone."""
    names = [path.name.partition(".")[0].split("-") for path in folder.glob("[0-9]*")]
    return max((int(last) + 1 for _, last in names), default=0)


def claimed_reasons(root, name):
    """By first offset, as the claims of the objects say."""
    paths = (root / ".logmirror" / "claims" / name / "0").iterdir()
    contents = [json.loads(path.read_bytes()) for path in paths]
    return {content["from"]: content["trigger"] for content in contents}


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open():
    yield
    forget_connections()


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog):
    caplog.set_level(logging.DEBUG, logger="logmirror")


def test_r9_all_five_reasons_in_one_run(cli_broker, tmp_path, caplog):
    topic = cli_broker.create_topic("seen-reasons")
    produce(cli_broker.bootstrap, topic, some(100))
    soon = (datetime.now(UTC) + timedelta(seconds=3)).strftime("%H:%M:%S")
    limits = {"max-time-ms": 600_000, "max-bytes": 1 << 30, "max-offsets": 1_000_000}
    reasons = {
        "max-offsets": {"max-offsets": 10},
        "max-bytes": {"max-bytes": 300},
        "max-time": {"max-time-ms": 500},
        "daily": {"daily": {"at-utc": soon}},
        "explicit": {},
    }
    mirrors = [
        mirror(topic, cli_broker.bootstrap, tmp_path, name=name, flush={**limits, **own})
        for name, own in reasons.items()
    ]
    config = write_config(tmp_path / "config.json", *mirrors)

    def seen():
        return {facts["mirror"] for facts in told(caplog, "flushed")}

    with running(config) as (recorder, errors):
        wait_until(lambda: errors or len(seen()) == 4, what=lambda: f"flushes: {seen()}")

    assert errors == []
    counted = of_metric(recorder, "destination_flushes_total")
    for name in reasons:
        flushed = [facts for facts in told(caplog, "flushed") if facts["mirror"] == name]
        said = {facts["from"]: facts["trigger"] for facts in flushed}
        flow = (name, name, topic, "0")
        assert said[0] == name
        assert set(said.values()) <= {name, "explicit"}  # a stop writes what is left
        assert claimed_reasons(tmp_path, name) == said
        for reason in set(said.values()):
            assert counted[(*flow, reason)] == list(said.values()).count(reason)
        assert of_metric(recorder, "destination_offset_verified")[flow] == 100


def test_r10_and_r11_of_transactions_into_files_and_into_clusters(cli_broker, tmp_path, caplog):
    """Thousands of offsets without a record: figures, not lines; and each line has its mirror."""
    topic = cli_broker.create_topic("seen-gaps")
    transactions = [(some(50), True), (some(3000), False), (some(50), True)]
    produce_transactions(cli_broker.bootstrap, topic, transactions, transactional_id=topic)
    here = cli_broker.bootstrap
    names = ("files", "copy", "new-offsets")
    config = write_config(
        tmp_path / "config.json",
        mirror(topic, here, tmp_path, name="files", max_time_ms=100),
        mirror_to_cluster(topic, here, here, name="copy", topic="seen-gaps-copy"),
        mirror_to_cluster(
            topic, here, here, name="new-offsets", topic="seen-gaps-new", offsets="translate"
        ),
    )

    def records():
        found = of_metric(recorder, "destination_records_total")
        return {labels[0]: count for labels, count in found.items()}

    with running(config, heartbeat_ms=1000) as (recorder, errors):
        wait_until(
            lambda: (
                errors or (records() == dict.fromkeys(names, 100) and told(caplog, "heartbeat"))
            ),
            what=lambda: f"records: {records()}",
        )

    assert errors == []
    gaps = of_metric(recorder, "source_offset_gap_records_total")
    for name in names:
        flow = (name, name, topic, "0")
        assert {cause: gaps[(*flow, cause)] for cause in ("control", "aborted")} == {
            "control": 3,
            "aborted": 3000,
        }, name
    assert len(gaps) == 2 * len(names)
    mirrored = [r for r in caplog.records if r.name == "logmirror.mirror"]
    assert len([r for r in mirrored if r.getMessage() != "heartbeat"]) <= 20
    assert {r.getMessage().partition(":")[0] for r in mirrored} >= {
        "mirror starts", "flushed", "copied", "heartbeat"
    }  # fmt: skip
    for record in mirrored:
        assert record.facts["mirror"] in names, record
        assert record.facts["topic"] == topic, record
        assert ("partition" in record.facts) == (record.getMessage() in ("flushed", "copied"))


@pytest.fixture
def own_broker(tmp_path):
    broker = BrokerCommand(tmp_path / "broker")
    try:
        yield broker.start()
    finally:
        broker.remove()


def test_the_port_and_the_log_through_the_life_of_a_run(own_broker, tmp_path):
    topic = own_broker.create_topic("seen-life", 2)
    root, port = tmp_path / "archive", free_ports(1)[0]
    limits = {"max-time-ms": 100, "max-bytes": 1 << 30, "max-offsets": 40}
    mirrors = [mirror(topic, own_broker.bootstrap, root, name=n, flush=limits) for n in "ab"]
    config = write_config(tmp_path / "config.json", *mirrors)
    arguments = ("--log-level", "debug", "--log-format", "json")
    variables = {"LOGMIRROR_METRICS_PORT": str(port), "LOGMIRROR_HEARTBEAT_SECS": "1"}
    flow = ("a", "a", topic, "0")

    def position_of_a():
        shown = scrape(port).get(("destination_offset_verified", flow), 0)
        assert shown <= durable_position(root / "a" / "0")
        return shown

    def readiness():
        return ask(port, "/readyz")

    with InlineRun(config, *arguments, folder=tmp_path, environment=variables) as run:
        run.wait_for("mirror starts.*b")
        for n in range(1, 6):
            produce(own_broker.bootstrap, topic, some(100))
            wait_until(lambda n=n: position_of_a() == 100 * n, what=lambda: f"a figure: {run.text}")
        wait_until(lambda: readiness().status == 200, what=lambda: f"ready: {readiness()}")
        assert ask(port, "/livez").status == 200
        flows = {(f["mirror"], f["partition"]): f for f in status_of(port)["flows"]}
        assert sorted(flows) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        shown = flows["a", 0]
        assert (shown["position"], shown["source_end"], shown["lag"]) == (500, 500, 0)
        assert (shown["waiting_since_ms"], shown["last_error"]) == (None, None)

        own_broker.kill()
        wait_until(
            lambda: readiness().text.count("state=waiting kind=unavailable") == 2,
            what=lambda: f"two that wait: {readiness()}",
        )
        assert readiness().status == 503
        assert ask(port, "/livez").status == 200
        waiting = next(f for f in status_of(port)["flows"] if f["mirror"] == "a")
        assert waiting["waiting_since_ms"] > 1_700_000_000_000
        assert waiting["last_error"]["kind"] == "unavailable"
        assert scrape(port)["errors_total", (*flow, "unavailable")] >= 1

        own_broker.start()
        wait_until(lambda: readiness().status == 200, what=lambda: f"ready: {readiness()}")
        run.wait_for('"event": "heartbeat"')
        run.signal(signal.SIGTERM)
        assert run.wait() == 0

    events = [json.loads(line) for line in run.text.splitlines()]
    assert {event["mirror"] for event in events if event["event"] != "answers monitoring"} == {
        "a",
        "b",
    }
    beats = [event for event in events if event["event"] == "heartbeat"]
    assert {beat["level"] for beat in beats} == {"DEBUG"}
    of_a = [beat for beat in beats if beat["mirror"] == "a"]
    assert of_a[-1]["position"] == 500
    assert sum(beat["progress"] for beat in of_a) == 500


@pytest.fixture
def small_config(cli_broker, tmp_path):
    topic = cli_broker.create_topic(f"seen-{tmp_path.name}")
    produce(cli_broker.bootstrap, topic, some(10))
    return write_config(tmp_path / "config.json", mirror(topic, cli_broker.bootstrap, tmp_path))


def test_a_port_that_is_taken_is_a_warning_and_the_copy_is_made(small_config, tmp_path):
    with socket.create_server(("0.0.0.0", 0)) as other:
        variables = {"LOGMIRROR_METRICS_PORT": str(other.getsockname()[1])}
        with InlineRun(small_config, "--until-now", folder=tmp_path, environment=variables) as run:
            assert run.wait() == 0, run.text
    assert "WARNING monitoring is not answered" in run.text
    assert durable_position(tmp_path / "parquet" / "0") == 10


@pytest.mark.parametrize("variable", ["LOGMIRROR_METRICS_PORT", "LOGMIRROR_HEARTBEAT_SECS"])
def test_a_value_that_is_no_number_is_told_at_the_start(small_config, tmp_path, variable):
    with InlineRun(small_config, folder=tmp_path, environment={variable: "9o"}) as run:
        assert run.wait() == 2
    assert f"variable: {variable}" in run.text
    assert "value: 9o" in run.text
