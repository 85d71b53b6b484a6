"""A run as operators see it: HTTP port, log, each flush with its reason (R9, R12; KNB-02).

Method: real runs without Spark against the embedded broker. They are processes where the test needs
an environment or an exit code, otherwise threads of this process. Metrics are read by Prometheus's
parser, positions by a listing of the directory.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
from datetime import UTC, datetime, timedelta

import pytest

from kit.judges.clients import Message, produce
from kit.judges.copies import forget_connections
from kit.judges.scrape import ask, scrape, status_of
from kit.runs.commands import BrokerCommand, mirror, run_forked, wait_until, write_config
from kit.runs.inline_run import InlineRun, config_text
from kit.runs.watched import running
from kit.servers.machine import free_ports

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(600)]


def some(count):
    return [Message(b"k%d" % n, b"value %d" % n, (), 1_700_000_000_000 + n) for n in range(count)]


def events(caplog, name):
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
    soon = (datetime.now(UTC) + timedelta(seconds=5)).strftime("%H:%M:%S")
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
        return {facts["mirror"] for facts in events(caplog, "flushed")}

    with running(config) as run:
        wait_until(lambda: run.errors or len(seen()) == 4, what=lambda: f"flushes: {seen()}")

    assert run.errors == []
    counted = run.of("destination_flushes_total")
    for name in reasons:
        flushed = [facts for facts in events(caplog, "flushed") if facts["mirror"] == name]
        said = {facts["from"]: facts["trigger"] for facts in flushed}
        flow = (name, name, topic, "0")
        assert said[0] == name
        assert set(said.values()) <= {name, "explicit"}  # a stop writes what is left
        assert claimed_reasons(tmp_path, name) == said
        for reason in set(said.values()):
            assert counted[(*flow, reason)] == list(said.values()).count(reason)
        assert run.of("destination_offset_verified")[flow] == 100


@pytest.fixture
def own_broker(tmp_path):
    broker = BrokerCommand(tmp_path / "broker")
    try:
        yield broker.start()
    finally:
        broker.remove()


def test_the_http_port_during_a_run(own_broker, tmp_path):
    topic = own_broker.create_topic("seen-life", 2)
    root, port = tmp_path / "archive", free_ports(1)[0]
    limits = {"max-time-ms": 100, "max-bytes": 1 << 30, "max-offsets": 40}
    mirrors = [mirror(topic, own_broker.bootstrap, root, name=n, flush=limits) for n in "ab"]
    config = write_config(tmp_path / "config.json", *mirrors)
    flow = ("a", "a", topic, "0")

    def position_of_a():
        shown = scrape(port).get(("destination_offset_verified", flow), 0)
        assert shown <= durable_position(root / "a" / "0")
        return shown

    def readiness():
        return ask(port, "/readyz")

    def wait_until_ready():
        wait_until(lambda: readiness().status == 200, what=lambda: f"ready: {readiness()}")

    with running(config, port=port, retry_budget_ms=500) as run:
        wait_until_ready()
        for n in range(1, 6):
            produce(own_broker.bootstrap, topic, some(100))
            wait_until(lambda n=n: position_of_a() == 100 * n, what=lambda: "a figure")
        assert ask(port, "/livez").status == 200
        flows = {(f["mirror"], f["partition"]): f for f in status_of(port)["flows"]}
        assert sorted(flows) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        shown = flows["a", 0]
        assert (shown["position"], shown["source_end"], shown["lag"]) == (500, 500, 0)
        assert (shown["waiting_since_ms"], shown["last_error"]) == (None, None)

        def those_that_wait():
            return [f for f in status_of(port)["flows"] if f["waiting_since_ms"] is not None]

        own_broker.kill()
        wait_until(
            # The lookup of a mirror's topic may fail before its flows report an unreachable source.
            lambda: (
                {(f["mirror"], f["partition"]) for f in those_that_wait()} >= {("a", 0)}
                and readiness().text.count("state=waiting kind=unavailable") == 2
            ),
            what=lambda: f"two that wait: {readiness()} {those_that_wait()}",
        )
        assert readiness().status == 503
        assert ask(port, "/livez").status == 200
        waiting = those_that_wait()
        assert waiting[0]["waiting_since_ms"] > 1_700_000_000_000
        assert waiting[0]["last_error"]["kind"] == "unavailable"
        assert run.of("errors_total")[(*flow, "unavailable")] >= 1

        own_broker.start()
        wait_until_ready()
    assert run.errors == []


@pytest.mark.mirror_v3("CFG-06")
def test_an_unreachable_destination_excluded_from_readiness(cli_broker, tmp_path):
    topic = cli_broker.create_topic("seen-silent")
    produce(cli_broker.bootstrap, topic, some(10))
    root, (port, unused) = tmp_path / "archive", free_ports(2)
    files = {"name": "files", "type": "filesystem", "root": str(root)}
    standby = {"name": "standby", "type": "kafka", "bootstrap-servers": f"127.0.0.1:{unused}"}
    config = write_config(
        tmp_path / "config.json",
        mirror(
            topic,
            cli_broker.bootstrap,
            root,
            max_offsets=10,
            destinations=[files, {**standby, "affects-readiness": False}],
        ),
    )
    with running(config, port=port, retry_budget_ms=500) as run:
        wait_until(
            lambda: (
                durable_position(root / "files" / "0") == 10
                and status_of(port)["mirrors"][0]["state"] == "waiting"
            ),
            what=lambda: f"a destination that waits: {status_of(port)}",
        )
        assert ask(port, "/readyz").status == 200
    assert run.errors == []


def test_lag_in_seconds_is_by_the_timestamps_of_records(cli_broker, tmp_path):
    """Those of `some` are years old, so the wall clock alone cannot explain them."""
    topic = cli_broker.create_topic("seen-old", 2)
    produce(cli_broker.bootstrap, topic, some(10))
    limits = {"max-time-ms": 600_000, "max-bytes": 1 << 30, "max-offsets": 1_000_000}
    one = mirror(topic, cli_broker.bootstrap, tmp_path, flush=limits)
    years_s = datetime.now(UTC).timestamp() - 1_700_000_000

    def record_lag():
        return run.of("source_lag_seconds")

    with running(write_config(tmp_path / "config.json", one)) as run:
        wait_until(
            lambda: max(record_lag().values(), default=0) > 1000, what=lambda: f"{record_lag()}"
        )
        found = record_lag()
        (worst,) = run.of("mirror_lag_seconds_max").values()
    assert sorted(age > 0 for age in found.values()) == [False, True]
    assert years_s <= max(found.values()) <= worst <= years_s + 300
    assert set(record_lag().values()) == {0}  # a stop writes what is left


def test_r12_the_heartbeat_of_a_run_is_a_debug_line_of_json(small_config, tmp_path):
    arguments = ("--log-level", "debug", "--log-format", "json")
    port = free_ports(1)[0]
    variables = {"LOGMIRROR_METRICS_PORT": str(port), "LOGMIRROR_HEARTBEAT_SECS": "1"}
    variables["LOGMIRROR_METRICS_PARTITIONS"] = "off"
    with InlineRun(small_config, *arguments, folder=tmp_path, environment=variables) as run:
        run.wait_for('"event": "heartbeat"')
        text = ask(port, "/metrics").text
        assert (
            'logmirror_mirror_flows{destination="parquet",mirror="parquet",state="running"}' in text
        )
        assert 'partition="' not in text
        run.signal(signal.SIGTERM)
        assert run.wait() == 0
    events = [json.loads(line) for line in run.text.splitlines()]
    assert [event["event"] for event in events[:2]] == ["metrics endpoint enabled", "mirror starts"]
    assert {event["mirror"] for event in events[1:]} == {"parquet"}
    beat = next(event for event in events if event["event"] == "heartbeat")
    assert (beat["level"], beat["flows"], beat["position"] + beat["lag"]) == ("DEBUG", 1, 10)


@pytest.fixture
def small_config(cli_broker, tmp_path):
    topic = cli_broker.create_topic(f"seen-{tmp_path.name}")
    produce(cli_broker.bootstrap, topic, some(10))
    return write_config(tmp_path / "config.json", mirror(topic, cli_broker.bootstrap, tmp_path))


def test_logs_go_to_stderr_alone_and_json_has_one_event_a_line(small_config, tmp_path):
    arguments = ("run", "--until-now", "--log-format", "json", "-c", str(small_config))
    result = run_forked(*arguments, timeout_s=240)
    assert (result.returncode, result.stdout) == (0, "")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert [event["event"] for event in events] == ["mirror starts", "flushed"]
    start, flushed = events
    assert list(start)[3:] == [
        "mirror", "topic", "partitions", "destinations", "formats", "compaction", "position"
    ]  # fmt: skip
    for event in events:
        event.pop("at")
    assert flushed.pop("bytes") == (tmp_path / flushed["path"]).stat().st_size
    assert flushed.pop("elapsed_ms") >= 0
    assert flushed.pop("interval_ms") >= 0
    assert flushed == {
        "level": "INFO",
        "event": "flushed",
        "mirror": "parquet",
        "destination": "parquet",
        "topic": f"seen-{tmp_path.name}",
        "partition": 0,
        "path": "parquet/0/00000000000000000000-00000000000000000009.parquet",
        "from": 0,
        "to": 9,
        "count": 10,
        "trigger": "explicit",
    }


def test_a_configured_port_in_use_ends_the_run_and_nothing_is_written(small_config, tmp_path):
    with socket.create_server(("0.0.0.0", 0)) as other:
        variables = {"LOGMIRROR_METRICS_PORT": str(other.getsockname()[1])}
        with InlineRun(small_config, "--until-now", folder=tmp_path, environment=variables) as run:
            assert run.wait() == 75, run.text
    assert "error (unavailable): the metrics endpoint cannot be opened" in run.text
    assert "LOGMIRROR_METRICS_PORT" in run.text
    assert not (tmp_path / "parquet").exists()


def test_ignored_variables_of_mirror_v3_are_logged_and_the_run_finishes(small_config, tmp_path):
    variables = {"LOGMIRROR_METRICS_PORT": "0"}
    variables |= {"MIRROR_V3_CACHE_PORT": "8080", "MIRROR_V3_READINESS_LAG": "5"}
    with InlineRun(small_config, "--until-now", folder=tmp_path, environment=variables) as run:
        assert run.wait() == 0, run.text
    (line,) = [line for line in run.text.splitlines() if "MIRROR_V3" in line]
    assert "variables=MIRROR_V3_CACHE_PORT,MIRROR_V3_READINESS_LAG" in line
    assert durable_position(tmp_path / "parquet" / "0") == 10


@pytest.mark.parametrize(
    "variable",
    [
        "LOGMIRROR_METRICS_PORT",
        "LOGMIRROR_METRICS_HOST",
        "LOGMIRROR_HEARTBEAT_SECS",
        "LOGMIRROR_METRICS_PARTITIONS",
        "MIRROR_V3_HEARTBEAT_SECS",
    ],
)
def test_an_invalid_environment_value_is_reported_at_the_start(small_config, tmp_path, variable):
    with InlineRun(small_config, folder=tmp_path, environment={variable: "9o"}) as run:
        assert run.wait() == 2
    assert f"variable: {variable}" in run.text
    assert "value: 9o" in run.text


def test_what_does_not_respond_is_reported_at_once_and_while_it_lasts(tmp_path):
    """A source that accepts connections and never responds: the wait is logged, not silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bootstrap = f"127.0.0.1:{silent.getsockname()[1]}"
        one = mirror("orders", bootstrap, tmp_path, max_time_ms=100)
        config = tmp_path / "config.json"
        config.write_text(config_text(one))
        with InlineRun(config, folder=tmp_path) as run:
            first = run.wait_for("WARNING source: ", timeout_s=30)
            waits = run.wait_for("waiting: no response yet", timeout_s=30)
            run.wait_for("waiting: no response yet .*silent_ms=1[0-9]{4}", timeout_s=30)
            run.signal(signal.SIGTERM)
            assert run.wait(timeout_s=30) in {0, 75}, run.text
    assert "mirrors=" in first
    assert f"source={bootstrap}" in waits
    assert "step=open" in waits
