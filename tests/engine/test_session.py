"""Which clusters may receive tasks, and a JVM that does not start or is not wanted any more."""

import logging
import os
import socket
import threading
from types import SimpleNamespace

import pytest
from py4j.clientserver import JavaClient, JavaParameters, PythonParameters

from logmirror.engine import jvm as jvm_module
from logmirror.engine.jvm import Jvm
from logmirror.engine.session import SessionStart, check_protected
from logmirror.errors import UnavailableError, UsageError
from logmirror.stopping import StoppedError

ENCRYPTED = "spark.network.crypto.enabled"


@pytest.mark.parametrize(
    ("properties", "missing"),
    [
        ({}, ["spark.authenticate", ENCRYPTED]),
        ({"spark.authenticate": "true"}, [ENCRYPTED]),
        ({ENCRYPTED: "true"}, ["spark.authenticate"]),
        ({"spark.authenticate": "false", "spark.ssl.rpc.enabled": "true"}, ["spark.authenticate"]),
        ({"spark.authenticate": "true", "spark.ssl.enabled": "true"}, [ENCRYPTED]),
    ],
)
def test_a_cluster_that_would_receive_tasks_in_clear_is_refused(properties, missing):
    given = {"spark.master": "spark://master:7077", **properties}
    with pytest.raises(UsageError) as refused:
        check_protected(given.get)
    assert refused.value.facts == {"master": "spark://master:7077", "missing": missing}
    assert "allow-plain" in refused.value.hint


@pytest.mark.parametrize("encryption", [ENCRYPTED, "spark.ssl.rpc.enabled"])
def test_a_cluster_that_authenticates_and_encrypts_is_accepted(encryption):
    check_protected({"spark.authenticate": "TRUE", encryption: "true"}.get)


@pytest.mark.parametrize("master", ["local[1]", "local-cluster[2,1,512]"])
def test_a_local_master_authenticates_the_clients_of_its_ports(master, tmp_path):
    start = SessionStart(master, {}, tmp_path, tmp_path / "log")
    local = start._local()  # noqa: SLF001  # a session would show the same, after a JVM's start
    assert local["spark.authenticate"] == "true"
    assert local["spark.driver.bindAddress"] == "127.0.0.1"
    has_secret = len(local.get("spark.authenticate.secret", "")) == 64
    assert has_secret == (master != "local[1]"), "Spark makes one for local[N] alone"


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Makes a Spark home whose launcher is a shell script."""

    def make(script):
        path = tmp_path / "bin" / "spark-submit"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("SPARK_HOME", str(tmp_path))
        return tmp_path / "spark.log"

    return make


def test_a_jvm_that_ends_at_its_start_is_unavailable_and_its_output_is_shown(launcher, tmp_path):
    log = launcher("echo no memory; exit 3")
    start = SessionStart("local[1]", {}, tmp_path, log)
    with pytest.raises(UnavailableError) as failed:
        start.begin()
    start.abort()
    assert failed.value.facts["reason"] == ["the JVM ended with code 3"]
    assert failed.value.facts["log"] == ["no memory"]


def test_a_jvm_that_does_not_listen_is_unavailable_in_time(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(jvm_module, "_START_MS", 200)
    log = launcher("exec sleep 600")
    start = SessionStart("local[1]", {}, tmp_path, log)
    with pytest.raises(UnavailableError) as failed:
        start.begin()
    start.abort()
    assert failed.value.facts["reason"] == ["the JVM did not listen within 0 s"]


def test_an_ended_jvm_is_not_started(launcher, tmp_path):
    jvm = Jvm()
    jvm.end(0)
    with pytest.raises(StoppedError):
        jvm.start({}, tmp_path, launcher(f"touch {tmp_path}/started"))
    assert not (tmp_path / "started").exists()


def test_a_jvm_has_its_time_to_leave_a_cluster(launcher, tmp_path, monkeypatch):
    """The script ends when its input closes, as Spark does, and then writes a file."""
    monkeypatch.setattr(jvm_module, "_START_MS", 0)
    left = tmp_path / "left"
    jvm = Jvm()
    with pytest.raises(TimeoutError):
        jvm.start({}, tmp_path, launcher(f"cat >/dev/null; touch {left}; exec sleep 0"))
    jvm.end(60)
    assert left.exists()


def test_the_jvm_survives_the_signals_that_stop_a_service(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(jvm_module, "_START_MS", 0)
    jvm = Jvm()
    log = launcher(f"kill -TERM $$; kill -INT $$; echo alive >{tmp_path}/alive; cat >/dev/null")
    with pytest.raises(TimeoutError):
        jvm.start({}, tmp_path, log)
    jvm.end(60)
    assert (tmp_path / "alive").read_text() == "alive\n"


def test_a_call_in_progress_when_the_jvm_ends_prints_no_traceback(caplog):
    logging.getLogger().removeFilter(jvm_module._is_no_lost_jvm)  # noqa: SLF001  # of other tests
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            for _ in range(2):
                server.accept()[0].close()

        ends = threading.Thread(target=hang_up)
        ends.start()
        java = JavaParameters(port=server.getsockname()[1])

        def call() -> None:
            client = JavaClient(java, PythonParameters(), SimpleNamespace(pool=None))
            client.send_command("i\ne\n", retry=False)

        call()
        assert "Exception while sending command." in caplog.text
        caplog.clear()
        Jvm().end(0)
        call()
        logging.error("of another")  # noqa: LOG015  # the root logger is what py4j uses
        ends.join()
    assert [record.message for record in caplog.records] == ["of another"]


def test_the_secrets_of_properties_are_not_in_the_command_line(launcher, tmp_path):
    log = launcher('printf "%s\\n" "$@"; exit 1')
    given = {"spark.driver.memory": "1g", "spark.driver.password": "canary", "spark.x": "canary"}
    start = SessionStart("local-cluster[1,1,1024]", given, tmp_path, log)
    with pytest.raises(UnavailableError):
        start.begin()
    start.abort()
    options = log.read_text()
    assert "--conf=spark.driver.memory=1g" in options
    assert "canary" not in options
    assert "authenticate" not in options
    assert os.environ.get("PYSPARK_GATEWAY_PORT") is None
