"""Goal: no broker that other hosts can reach serves clients that it does not authenticate.

Method: brokers start with such a listener, with and without consent; the others with listeners that
authenticate, or on loopback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kit.runs.commands import wait_until
from kit.servers import embedded
from kit.servers.machine import Process
from kit.servers.security import make_certificates
from logmirror.broker.options import BrokerOptions, ClientAuth, Listener, SecurityProtocol
from logmirror.broker.protocol.listening import bound_listeners
from logmirror.errors import UsageError

_SCRIPT = Path(embedded.__file__).parent / "run_broker.py"
EVERYWHERE = "0.0.0.0"


def _log_of_start(tmp_path: Path, **options: object) -> tuple[bool, str]:
    """Start a broker; returns whether it listened, and its log."""
    ready, log = tmp_path / "ready", tmp_path / "log"
    fixed = {"log_dir": str(tmp_path / "data"), "port": 0, "ready": str(ready)}
    command = [sys.executable, "-P", str(_SCRIPT), json.dumps({**fixed, **options})]
    process = Process(command, log=log)
    try:
        wait_until(lambda: ready.exists() or not process.alive, what=log.read_text, timeout_s=60)
    finally:
        process.end()
    return ready.exists(), log.read_text()


def test_a_broker_beyond_loopback_without_authentication_does_not_start(tmp_path):
    listened, text = _log_of_start(tmp_path, host=EVERYWHERE)

    assert not listened
    assert "would not be authenticated" in text


@pytest.mark.parametrize(("host", "warns"), [(EVERYWHERE, True), ("127.0.0.1", False)])
def test_a_broker_beyond_loopback_that_may_be_anonymous_warns(tmp_path, host, warns):
    listened, text = _log_of_start(tmp_path, host=host, allow_anonymous=True)

    assert listened
    assert ("WARNING" in text and "clients are not authenticated" in text) == warns


@pytest.mark.parametrize("others", [(), ("b", "c")])
def test_the_log_names_every_log_directory(tmp_path, others):
    more = [str(tmp_path / name) for name in others]
    listened, text = _log_of_start(tmp_path, more_log_dirs=more)

    assert listened
    assert f", log directories: {', '.join([str(tmp_path / 'data'), *more])}\n" in text


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize(
    ("protocol", "client_auth", "is_refused"),
    [
        (SecurityProtocol.PLAINTEXT, ClientAuth.REQUIRED, True),
        (SecurityProtocol.SSL, ClientAuth.NONE, True),
        (SecurityProtocol.SSL, ClientAuth.REQUESTED, True),
        (SecurityProtocol.SSL, ClientAuth.REQUIRED, False),
        (SecurityProtocol.SASL_PLAINTEXT, ClientAuth.NONE, False),
        (SecurityProtocol.SASL_SSL, ClientAuth.NONE, False),
    ],
)
def test_which_listeners_authenticate(certificates, tmp_path, protocol, client_auth, is_refused):
    options = BrokerOptions(
        log_dir=tmp_path,
        listeners=(Listener(name="OUTSIDE", host=EVERYWHERE, port=0, protocol=protocol),),
        tls_certificate=certificates.broker,
        tls_client_ca=certificates.authority,
        tls_client_auth=client_auth,
    )
    if is_refused:
        with pytest.raises(UsageError, match="would not be authenticated"):
            bound_listeners(options).__enter__()
        return
    with bound_listeners(options) as [bound]:
        # No password is sent where it can be read.
        shows_plain = "PLAIN" in bound.endpoint.mechanisms
        assert shows_plain == (protocol == SecurityProtocol.SASL_SSL)


def test_settings_that_contradict_each_other_are_refused(certificates, tmp_path):
    here = {"host": "127.0.0.1", "port": 0}
    secure = Listener(name="A", protocol=SecurityProtocol.SSL, **here)
    plain = Listener(name="A", **here)
    tls = {"tls_certificate": certificates.broker}
    for options, reason in (
        ({"listeners": (plain, plain)}, "same name"),
        ({"listeners": (secure,)}, "needs a certificate"),
        ({"listeners": (secure,), "tls_certificate": tmp_path / "none"}, "cannot be used"),
        (
            {"listeners": (secure,), **tls, "tls_key": certificates.client_key},
            "cannot be used",
        ),
        ({"listeners": (secure,), **tls, "tls_client_auth": ClientAuth.REQUIRED}, "checked"),
        ({"super_users": ("alice",)}, "not a principal"),
        ({"super_users": ("User:",)}, "without a name"),
        ({"sasl_mechanisms": ("GSSAPI",)}, "not supported"),
    ):
        given = {"port": 0, **options}
        with pytest.raises(UsageError, match=reason):
            bound_listeners(BrokerOptions(log_dir=tmp_path, **given)).__enter__()
