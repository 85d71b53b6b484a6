"""`logmirror broker`: its options, its section of the configuration file, and which of them counts.

Method: the command runs with a `serve` that only records the options of the broker.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

import logmirror
from logmirror.app import broker as app_broker
from logmirror.broker import server
from logmirror.cli import commands
from logmirror.cli.broker_values import DEFAULTS, broker_options
from logmirror.config.problems import ConfigError
from logmirror.errors import FencedError, UsageError

FILE = """
broker:
  log-dir: [a, b]
  listen: "[::1]:7000"
  auto-create: false
  partitions: 4
  topic: [orders, payments:2]
"""


@pytest.fixture
def served(monkeypatch):
    found = []
    monkeypatch.setattr(server, "serve", lambda options, **_: found.append(options))
    return found


def options_of(served, *words):
    assert commands.run_plain(["broker", *map(str, words)])
    return served.pop()


def test_the_section_of_the_file(served, tmp_path):
    path = tmp_path / "broker.yaml"
    path.write_text(FILE)

    found = options_of(served, "-c", path)

    assert found.log_dirs == (Path("a"), Path("b"))
    assert (found.host, found.port) == ("::1", 7000)
    assert not found.auto_create_topics
    assert found.default_partitions == 4
    assert found.topics == (("orders", 4), ("payments", 2))


def test_options_override_the_file(served, tmp_path):
    path = tmp_path / "broker.yaml"
    path.write_text(FILE)

    words = ("--log-dir=c", "--listen=127.0.0.1:0", "--auto-create", "--partitions=1", "--topic=t")
    found = options_of(served, "--config", path, *words)

    assert found.log_dirs == (Path("c"),)
    assert (found.host, found.port) == ("127.0.0.1", 0)
    assert found.auto_create_topics
    assert found.topics == (("t", 1),)


ARCHIVES = """
broker:
  log-dir: a
  archive-cache-bytes: 5000000
  archive:
    - bucket: kept
      prefix: kafka
      endpoint: "https://minio.example:9000"
      credentials: {access-key-id: reader, secret-access-key-env: READER_SECRET,
                    access-key-id-env: READER_KEY}
    - s3://other
"""


def test_a_bucket_of_archives_may_have_its_own_access(served, tmp_path, monkeypatch):
    path = tmp_path / "broker.yaml"
    path.write_text(ARCHIVES.replace("access-key-id: reader, ", ""))
    monkeypatch.setenv("READER_KEY", "reader")
    monkeypatch.delenv("READER_SECRET", raising=False)
    with pytest.raises(ConfigError) as raised:
        commands.run_plain(["broker", "-c", str(path)])
    assert "READER_SECRET is not set" in str(raised.value.problems[0])
    monkeypatch.setenv("READER_SECRET", "hidden")
    section = logmirror.load(path).broker

    own, other = section.archive
    assert (own.bucket, own.prefix, own.path_style) == ("kept", "kafka", True)
    assert own.endpoint == "https://minio.example:9000"
    assert own.read == own.write
    assert (own.read.access_key_id, own.read.secret_access_key) == ("reader", "hidden")
    assert "hidden" not in repr(section)
    assert other == "s3://other"
    found = options_of(served, "-c", path)
    assert [archive.root for archive in found.archives] == ["s3://kept/kafka", "s3://other"]
    assert found.archive_cache_bytes == 5_000_000
    assert options_of(served, "-c", path, "--archive-cache-bytes=7").archive_cache_bytes == 7


def test_wrong_settings_of_an_archive_are_clear_errors(served, tmp_path):
    path = tmp_path / "broker.yaml"
    path.write_text(ARCHIVES.replace("endpoint:", "endpont:"))
    with pytest.raises(ConfigError) as raised:
        commands.run_plain(["broker", "-c", str(path)])
    found = "\n".join(map(str, raised.value.problems))
    assert "did you mean endpoint?" in found
    assert "access-key-id is set too" in found
    assert served == []


SECURE = """
broker:
  log-dir: a
  listener: [INSIDE=PLAINTEXT://127.0.0.1:9092, OUTSIDE=SASL_SSL://0.0.0.0:9093]
  advertise: OUTSIDE=kafka.example.com:443
  allow-anonymous: true
  tls-certificate: broker.pem
  tls-key: key.pem
  tls-client-ca: ca.pem
  tls-client-auth: requested
  sasl-mechanism: SCRAM-SHA-512
  super-user: [User:admin, User:ops]
  max-connections: 5000
  max-connections-per-address: 50
  max-session-ms: 600000
"""


def test_the_file_may_have_every_setting_of_security(served, tmp_path):
    path = tmp_path / "broker.yaml"
    path.write_text(SECURE)

    found = options_of(served, "-c", path)

    inside, outside = found.listeners
    assert (inside.name, inside.protocol, inside.host, inside.port) == (
        "INSIDE",
        "PLAINTEXT",
        "127.0.0.1",
        9092,
    )
    assert (outside.protocol, outside.advertised_host, outside.advertised_port) == (
        "SASL_SSL",
        "kafka.example.com",
        443,
    )
    assert found.allow_anonymous
    assert (found.tls_certificate, found.tls_key) == (Path("broker.pem"), Path("key.pem"))
    assert (found.tls_client_ca, found.tls_client_auth) == (Path("ca.pem"), "requested")
    assert found.sasl_mechanisms == ("SCRAM-SHA-512",)
    assert found.super_users == ("User:admin", "User:ops")
    assert (found.max_connections, found.max_connections_per_address) == (5000, 50)
    assert found.max_session_ms == 600_000
    words = ("--no-allow-anonymous", "--tls-client-auth=none", "--super-user=User:me")
    words += ("--max-connections=7",)
    found = options_of(served, "-c", path, *words)
    assert not found.allow_anonymous
    assert (found.tls_client_auth, found.super_users) == ("none", ("User:me",))
    assert found.max_connections == 7


def test_a_setting_of_security_that_is_wrong_is_a_clear_error(served, tmp_path):
    path = tmp_path / "broker.yaml"
    path.write_text(
        "broker: {log-dir: a, listener: 'TCP://h:1', advertise: 'h:1', sasl-mechanism: GSSAPI}\n"
    )
    with pytest.raises(ConfigError) as raised:
        commands.run_plain(["broker", "-c", str(path)])
    found = "\n".join(map(str, raised.value.problems))
    assert "broker.listener: must be [NAME=]PROTOCOL://HOST:PORT" in found
    assert "broker.advertise: must be NAME=HOST:PORT" in found
    assert "broker.sasl-mechanism" in found
    assert served == []


def test_without_a_file_the_defaults_are_those_of_the_section(served, tmp_path):
    section = logmirror.load(text="broker: {log-dir: a}").broker
    assert dataclasses.asdict(section) == {**DEFAULTS, "log_dir": ("a",)}
    found = options_of(served, "--log-dir", "a")

    assert f"{found.host}:{found.port}" == section.listen
    assert found.auto_create_topics == section.auto_create
    assert found.default_partitions == section.partitions
    assert found.topics == section.topic == ()


def test_what_is_missing_or_wrong_is_a_clear_error(served, tmp_path):
    path = tmp_path / "mirrors.yaml"
    path.write_text("spark: {}\nbroker: {log-dir: a, lisen: x, partitions: 0, topic: 'a:0'}\n")
    with pytest.raises(ConfigError) as raised:
        commands.run_plain(["broker", "-c", str(path)])
    assert [str(problem).partition(": ")[2] for problem in raised.value.problems] == [
        "broker.lisen: unknown key (did you mean listen?)",
        "broker.partitions: must be 1 or more",
        "broker.topic: must be NAME or NAME:PARTITIONS, such as orders:3",
    ]
    for words in ([], ["--log-dir=a", "--listen=9092"], ["--log-dir=a", "--topic=a:x"]):
        with pytest.raises(UsageError):
            commands.run_plain(["broker", *words])
    assert served == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log-dir=s3://a/b", "--log-dir=s3://c/d"], "only one log directory may be in a bucket"),
        (["--log-dir=a", "--log-dir=s3://c/d", "--standby"], "a standby has no log directory"),
        (["--log-dir=a", "--work-dir=w"], "--work-dir is for a log directory in a bucket"),
        *(
            ([f"--log-dir={path}", "--log-dir=a"], "--log-dir must be a directory, or s3://")
            for path in ("", "S3://b/p", "s3:/b/p", "gs://b/p", "file:///srv/kafka")
        ),
    ],
)
def test_what_a_bucket_does_not_allow_is_a_clear_error(served, words, message):
    with pytest.raises(UsageError, match=message):
        commands.run_plain(["broker", *words])
    assert served == []


def test_directories_on_disks_may_be_beside_a_bucket():
    given = {**DEFAULTS, "log_dir": ("a", "s3://c/d", "b")}
    found = broker_options(given.__getitem__)
    assert found.bucket == "s3://c/d"
    assert found.disk_dirs == (Path("a"), Path("b"))


def test_validate_describes_the_section(tmp_path):
    path = tmp_path / "broker.yaml"
    path.write_text(FILE)
    result = CliRunner().invoke(commands.build("validate"), ["validate", "-c", str(path)])
    assert result.output.splitlines() == [
        "OK: 0 mirror(s), 0 destination(s) total",
        "broker: listens on [::1]:7000, log directories: a, b",
    ]


def test_a_file_without_mirrors_has_nothing_to_run():
    with pytest.raises(UsageError, match="no mirrors"):
        logmirror.run(logmirror.load(text="broker: {log-dir: a}"))
    with pytest.raises(ConfigError):
        logmirror.load(text="spark: {}")


def test_a_topic_has_one_number_of_partitions(served, tmp_path):
    found = options_of(served, "--log-dir=a", "--topic=t:2", "--topic=t:2", "--topic=u")
    assert found.topics == (("t", 2), ("u", 1))
    with pytest.raises(UsageError, match="--topic has t with 1 partitions and with 2"):
        commands.run_plain(["broker", "--log-dir=a", "--topic=t", "--topic=t:2"])
    with pytest.raises(ConfigError) as raised:
        logmirror.load(text="broker: {log-dir: a, topic: [t, 't:2']}")
    [problem] = raised.value.problems
    assert str(problem) == "1:22: broker.topic: has t with 1 partitions and with 2"
    logmirror.load(text="broker: {log-dir: a, partitions: 2, topic: [t, 't:2']}")


def test_validate_reports_overrides_that_the_broker_refuses(tmp_path):
    overrides = "log.segment.bytes=foo", "log.retention.mss=1", "log.roll.ms=5"
    text = f"broker:\n  log-dir: a\n  override: [{', '.join(overrides)}]\n"
    path = tmp_path / "broker.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        CliRunner().invoke(
            commands.build("validate"), ["validate", "-c", str(path)], catch_exceptions=False
        )
    assert {(one.line, one.message, one.suggestion) for one in raised.value.problems} == {
        (3, "log.segment.bytes must be an integer from 1024 to 2147483647", ""),
        (3, "log.retention.mss is not supported", "did you mean log.retention.ms?"),
    }


def test_a_broker_that_is_fenced_names_its_log_directory(monkeypatch):
    def fenced(*_, **__):
        raise FencedError("another broker took over this log dir", epoch=1)

    monkeypatch.setattr(app_broker, "begin_writing", lambda *_: None)
    monkeypatch.setattr(app_broker, "serve", fenced)
    with pytest.raises(FencedError) as raised:
        commands.run_plain(["broker", "--log-dir=s3://b/p"])
    assert raised.value.facts == {"log_dir": "s3://b/p", "epoch": 1}
