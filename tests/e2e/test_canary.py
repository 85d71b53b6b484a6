"""No output shows a secret, for any command, log level, format, error, page or process.

Method: canaries are put wherever a secret can be configured; some of them are the passwords of a
real broker and a real bucket. Each command runs, successfully and with errors, and all its visible
output is searched for each canary: plain, in base64 and as a part of a URL.
"""

from __future__ import annotations

import base64
import json
import signal
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from kit.judges.clients import Message, produce
from kit.judges.scrape import ask
from kit.runs.commands import Run, logmirror, wait_until
from kit.runs.inline_run import InlineRun
from kit.servers.machine import HOST, free_ports
from kit.servers.s3 import S3Server
from kit.servers.security import PASSWORD, USER

pytestmark = pytest.mark.timeout(600)

KEY_PASSWORD = "canary-of-the-key+/= &?"
WRONG = "canary-wrong-password ;&="
SPARK_SECRET = "canary-of-spark/s3+key"
SPARK_OTHER = "canary-of-spark-other+/="
TOKEN = "canary-session-token+/="
FLUSH = {"max-time-ms": 200, "max-bytes": 1 << 20, "max-offsets": 1000}


class Canaries:
    """Values, and whether a text has one."""

    def __init__(self, *values: str) -> None:
        self.forms: set[str] = set()
        for value in values:
            raw = value.encode()
            for shift in range(3):  # base64 has three ways to begin
                coded = base64.b64encode(b"\0" * shift + raw).decode()
                self.forms.add(coded[4 if shift else 0 : -4])
            self.forms |= {value, json.dumps(value)[1:-1], urllib.parse.quote(value)}
            self.forms |= {urllib.parse.quote_plus(value), urllib.parse.quote(value, safe="")}
        assert all(len(form) > 7 for form in self.forms)

    def check(self, what: str, text: str) -> None:
        """Fail for a text that has one; say which, and where."""
        assert text, f"nothing was seen of {what}"
        for form in self.forms:
            at = text.find(form)
            assert at < 0, f"{what} shows {form!r} in {text[max(at - 200, 0) : at + 100]!r}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with S3Server(tmp_path_factory.mktemp("s3-canary")) as running:
        yield running


@pytest.fixture(scope="module")
def key(certificates):
    """A private key, encrypted with a password, as PEM."""
    plain = serialization.load_pem_private_key(certificates.client_key.read_bytes(), None)
    return plain.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(KEY_PASSWORD.encode()),
    ).decode()


@pytest.fixture(scope="module")
def canaries(server, key):
    lines = key.splitlines()[1:-1]
    return Canaries(
        PASSWORD,
        KEY_PASSWORD,
        WRONG,
        SPARK_SECRET,
        SPARK_OTHER,
        TOKEN,
        server.secret_key,
        *lines[:2],
    )


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("secrets") / "password"
    path.write_text(f"{PASSWORD}\n")
    return path


@pytest.fixture(scope="module")
def source(secure_kafka, certificates, key, secret_file):
    """Reached with a password, a certificate and its key."""
    topic = secure_kafka.create_topic("canary")
    produce(secure_kafka.bootstrap, topic, [Message(b"k", b"v%d" % n, (), n) for n in range(20)])
    return {
        "bootstrap-servers": secure_kafka.address("SASLTLS"),
        "properties": {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": f"${{file:{secret_file}}}",
            "ssl.ca.location": str(certificates.authority),
            "ssl.certificate.pem": certificates.client_certificate.read_text(),
            "ssl.key.pem": key,
            "ssl.key.password": KEY_PASSWORD,
        },
    }


def configuration(path, source, server, root, **changes):
    """A file with a canary at each place where a secret can stand."""
    cluster = {"name": "standby", "type": "kafka", "topic": f"canary-in-{path.stem}", **source}
    bucket = server.destination(server.new_bucket(), name="lake")
    mirror = {
        "name": "m",
        "source": source,
        "topic": "canary",
        "partitions": "all",
        "destinations": [
            {"name": "files", "type": "filesystem", "root": str(root)},
            bucket,
            cluster,
        ],
        "flush": FLUSH,
    }
    properties = {
        "spark.hadoop.fs.s3a.secret.key": SPARK_SECRET,
        "spark.example.passphrase": SPARK_OTHER,
    }
    spark = {"master": "local[1]", "properties": properties | changes.pop("spark", {})}
    path.write_text(json.dumps({"mirrors": [mirror | changes], "spark": spark}, indent=1))
    return path


@pytest.fixture(scope="module")
def good(source, server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    return configuration(folder / "good.json", source, server, folder / "archive").read_text()


def got(url):
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def seen(result):
    return f"{result.stdout}\n{result.stderr}"


def test_commands_that_connect_to_nothing(canaries, source, server, tmp_path):
    path = configuration(tmp_path / "good.json", source, server, tmp_path / "archive")
    bucket = {"type": "s3", "name": "b", "bucket": "archive", "credentials": {}}
    keys = {"access-key-id": "k", "secret-access-key": server.secret_key, "session-token": TOKEN}
    good = json.loads(path.read_text())
    good["mirrors"][0]["destinations"].append(bucket | {"credentials": {"write": keys}})
    path.write_text(json.dumps(good, indent=1))
    for words in (["validate"], ["validate", "--format", "json"], ["acls", "print"]):
        result = logmirror(*words, "-c", path)
        assert result.returncode == 0, seen(result)
        canaries.check(" ".join(words), seen(result))
    for words in (["policy", "print", "-c", path], ["schema"]):
        result = logmirror(*words)
        assert result.returncode == 0, seen(result)
        canaries.check(words[0], seen(result))


@pytest.mark.parametrize(
    ("place", "put"),
    [
        (("source", "properties", "sasl.password"), [PASSWORD, WRONG]),
        (("source", "properties", "ssl.key.password"), {WRONG: KEY_PASSWORD}),
        (("source", "properties", "ssl.key.pem"), WRONG),
        (("source", "properties", "sasl.pasword"), PASSWORD),
        (("source", "properties", "check.crcs"), WRONG),
        (("source",), WRONG),
        (("topic",), WRONG),
        (("destinations", 1, "credentials"), TOKEN),
        (("destinations", 1, "credentials", "secret-access-key"), [TOKEN]),
        (("destinations", 1, "credentials", "session-token"), {"a": TOKEN}),
        (("destinations", 1, "credentials", "write"), {"secret-access-key": TOKEN}),
        (("destinations", 2, "properties"), [PASSWORD]),
    ],
    ids=str,
)
def test_a_faulty_value_in_place_of_a_secret(canaries, good, tmp_path, place, put):
    path, broken = tmp_path / "bad.json", json.loads(good)
    within = broken["mirrors"][0]
    for part in place[:-1]:
        within = within[part]
    within[place[-1]] = put
    path.write_text(json.dumps(broken, indent=1))
    result = logmirror("validate", "-c", path)
    canaries.check("validate", seen(result))
    assert result.returncode == 2 or place[-1] == "ssl.key.pem", seen(result)


def test_commands_that_connect_and_the_http_pages_of_a_run(canaries, source, server, tmp_path):
    path = configuration(tmp_path / "run.json", source, server, tmp_path / "archive")
    checked = logmirror("validate", "--check", "-c", path)
    assert checked.returncode == 0, seen(checked)
    canaries.check("validate --check", seen(checked))
    for form in ("text", "json"):
        port = free_ports(1)[0]
        words = ("--log-level", "debug", "--log-format", form)
        environment = {"LOGMIRROR_METRICS_PORT": str(port), "LOGMIRROR_HEARTBEAT_SECS": "1"}
        with InlineRun(path, *words, folder=tmp_path, environment=environment) as run:
            run.wait_for("heartbeat")
            for page in ("/metrics", "/status.json", "/readyz", "/livez"):
                canaries.check(page, ask(port, page).text)
            command = Path(f"/proc/{run.pid}/cmdline").read_bytes().decode()
            canaries.check("the command line", command)
            run.signal(signal.SIGTERM)
            assert run.wait() == 0, run.text
        canaries.check(f"run, {form}", run.text)
    for words in (["status"], ["status", "--format", "json"], ["verify"], ["verify", "--deep"]):
        result = logmirror(*words, "-c", path)
        assert result.returncode == 0, seen(result)
        canaries.check(" ".join(words), seen(result))
    for written in (tmp_path / "archive").rglob("*"):
        if written.is_file():
            canaries.check(str(written), written.read_bytes().decode("latin-1"))


def test_failed_authentication_and_unreachable_brokers(canaries, source, server, tmp_path):
    wrong = {**source, "properties": source["properties"] | {"sasl.password": WRONG}}
    path = configuration(tmp_path / "wrong.json", wrong, server, tmp_path / "archive")
    file = json.loads(path.read_text())
    far = dict(file["mirrors"][0], name="far", topic="far")
    far["source"] = {**source, "bootstrap-servers": f"{HOST}:{free_ports(1)[0]}"}
    other_keys = {"access-key-id": server.access_key, "secret-access-key": WRONG}
    token = {"session-token": TOKEN}
    lake = file["mirrors"][0]["destinations"][1]
    far["destinations"] = [
        dict(lake, name="x", credentials=other_keys),
        dict(lake, name="y", credentials=other_keys | token),
    ]
    file["mirrors"].append(far)
    path.write_text(json.dumps(file, indent=1))

    checked = logmirror("validate", "--check", "-c", path)

    assert checked.returncode == 2
    assert "sasl.password" in checked.stdout
    canaries.check("validate --check", seen(checked))
    for words in (["status"], ["verify", "--against-source"]):
        result = logmirror(*words, "--mirror", "m", "-c", path)
        assert result.returncode
        canaries.check(" ".join(words), seen(result))
    with InlineRun(path, "--log-level", "debug", folder=tmp_path) as run:
        assert run.wait() == 2, run.text
    canaries.check("run", run.text)


def test_spark_pages_event_log_and_process_list(canaries, source, server, tmp_path):
    events, port = tmp_path / "events", free_ports(1)[0]
    events.mkdir()
    spark = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.ui.enabled": "true",
        "spark.ui.port": str(port),
    }
    path = configuration(tmp_path / "spark.json", source, server, tmp_path / "archive", spark=spark)
    with Run(path, "--log-level", "debug", folder=tmp_path) as run:
        run.wait_for(" flushed ")
        for process in run.processes():
            canaries.check("a command line", " ".join(process.cmdline()))
        assert any("java" in process.name() for process in run.processes())
        ui = f"http://{HOST}:{port}"
        (application,) = json.loads(got(f"{ui}/api/v1/applications"))
        shown = got(f"{ui}/api/v1/applications/{application['id']}/environment")
        assert "spark.example.passphrase" in shown
        canaries.check("Spark's interface", shown)
        for page in ("environment", "jobs", "executors"):
            canaries.check(page, got(f"{ui}/{page}/"))
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text
    canaries.check("run", run.text)
    if run.spark_text:
        canaries.check("the JVM's output", run.spark_text)
    (log,) = [one for one in events.rglob("*") if one.is_file() and not one.name.endswith(".crc")]
    wait_until(lambda: not log.name.endswith(".inprogress"), what=lambda: str(log))
    text = log.read_text(encoding="utf-8")
    assert "spark.hadoop.fs.s3a.secret.key" in text
    canaries.check("the event log", text)
