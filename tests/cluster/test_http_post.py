"""The request for a token: where the secret goes, and how long the request takes.

Method: real HTTP and HTTPS servers on loopback. Some speak HTTP by a library, some send bytes as a
test says. Canary secrets are searched in whatever a failure shows.
"""

import base64
import socket
import ssl
import threading
import time
import urllib.parse

import pytest

from kit.fakes.token_endpoint import (
    QUERY,
    SECRET,
    TOKEN,
    check_no_canary,
    get,
    settings_for,
    url_of,
)
from kit.servers.security import make_certificates
from logmirror.cluster import http_post
from logmirror.cluster.properties import property_problems
from logmirror.errors import UnavailableError, UsageError


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


# -- where the secret goes -------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_error_and_its_target_sees_nothing(serve, status):
    target = serve()
    endpoint = serve((status, {"Location": url_of(target)}, b""))
    with pytest.raises(UsageError, match="redirects") as caught:
        get(url_of(endpoint))
    assert caught.value.facts["status"] == status
    assert "token.endpoint.url" in caught.value.hint
    assert len(endpoint.asked) == 1
    assert target.asked == []
    check_no_canary(caught.value)


def test_the_request_holds_the_credentials_and_the_scope(serve):
    endpoint = serve()
    token = get(url_of(endpoint), **{"sasl.oauthbearer.scope": "kafka a"})
    assert (token.text, token.is_cached) == (TOKEN, False)
    ((path, headers, body),) = endpoint.asked
    assert path == f"/token?key={QUERY}"
    assert base64.b64decode(headers["Authorization"].split()[1]) == f"mirror:{SECRET}".encode()
    assert dict(urllib.parse.parse_qsl(body)) == {
        "grant_type": "client_credentials",
        "scope": "kafka a",
    }
    assert TOKEN not in repr(token)


@pytest.mark.parametrize(
    "url",
    [
        "http://idp.example/token",
        "http://10.0.0.7:8080/token",
        "http://127.0.0.1.example/token",
        "ftp://idp.example/token",
        "https:///token",
        "https://idp.example:99999/token",
        f"https://me:{SECRET}@idp.example/token",
        f"https://idp.example/to ken{SECRET}",
        f"https://idp.example/token\r\nX: {SECRET}",
    ],
)
def test_an_address_that_is_no_safe_place_for_a_secret_is_refused_when_it_is_loaded(url):
    with pytest.raises(UsageError, match=r"token\.endpoint\.url") as caught:
        settings_for(url)
    assert SECRET not in f"{caught.value!r} {caught.value} {caught.value.facts}"


@pytest.mark.parametrize(
    "url", ["http://localhost:1/t", "http://127.0.0.9/t", "http://[::1]:80", "https://idp.example"]
)
def test_https_and_addresses_of_this_machine_are_accepted(url):
    assert settings_for(url).oauth_token_endpoint == url


def test_a_certificate_must_be_trusted(serve, certificates, monkeypatch):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.broker)
    endpoint = serve(tls=tls)
    with pytest.raises(UsageError, match="not trusted") as caught:
        get(url_of(endpoint, "https"))
    assert "https.ca.location" in caught.value.hint
    assert endpoint.asked == []
    by_file = {"https.ca.location": str(certificates.authority)}
    assert get(url_of(endpoint, "https"), **by_file).text == TOKEN
    by_text = {"https.ca.pem": certificates.authority.read_text()}
    assert get(url_of(endpoint, "https"), **by_text).text == TOKEN
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")  # not for this machine
    assert get(url_of(endpoint, "https"), **by_text).text == TOKEN


def test_certificates_without_an_endpoint_have_no_effect_and_are_refused():
    ((name, message, _),) = property_problems("h:1", {"https.ca.location": "/ca.pem"})
    assert name == "https.ca.location"
    assert "no effect" in message


def test_a_proxy_sees_the_host_and_not_the_request(scripted, monkeypatch):
    seen = []

    def proxy(peer):
        with peer:
            seen.append(peer.recv(10_000).decode())
            peer.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")

    monkeypatch.setenv("https_proxy", f"http://me:p%20w@127.0.0.1:{scripted(proxy)}")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(UsageError, match="proxy") as caught:
        get("https://idp.example/token")
    check_no_canary(caught.value)
    (request,) = seen
    assert request.startswith("CONNECT idp.example:443 HTTP/1.1\r\n")
    assert base64.b64encode(b"me:p w").decode() in request
    assert "mirror" not in request


# -- how long it takes -----------------------------------------------------------------------------


def slow(head, *, interval_s=0.05):
    def script(peer):
        with peer:
            try:
                peer.sendall(head)
                while True:
                    peer.sendall(b"x")
                    time.sleep(interval_s)
            except OSError:
                pass

    return script


def silent(peer):
    with peer:
        while peer.recv(1000):
            pass


@pytest.mark.parametrize(
    ("script", "scheme"),
    [
        (slow(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"), "http"),
        (slow(b"HTTP/1.1 200 OK\r\n\r\n"), "http"),
        (slow(b"HTTP/1.1 200 OK\r\nX-"), "http"),
        (slow(b""), "http"),
        (silent, "http"),
        (silent, "https"),
        (slow(b"\x16\x03\x03\x40\x00"), "https"),  # a handshake record of 16 KiB
    ],
    ids=["body", "body without a length", "head", "first line", "silence", "handshake", "record"],
)
def test_an_endpoint_that_drips_is_given_up_at_the_deadline(scripted, script, scheme):
    port = scripted(script)
    begun = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        get(url_of(port, scheme), within_ms=500)
    assert time.monotonic() - begun < 15
    check_no_canary(caught.value)


def test_a_host_name_lookup_that_hangs_is_given_up_at_the_deadline(monkeypatch):
    done, lookup = threading.Event(), socket.getaddrinfo
    asked = []

    def hang(host, *rest):
        if rest[-1] == socket.AI_NUMERICHOST:
            return lookup(host, *rest)
        asked.append(host)
        assert done.wait(30)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    begun = time.monotonic()
    for _ in range(3):
        with pytest.raises(UnavailableError):
            get("https://idp.example/token", within_ms=200)
    done.set()
    assert time.monotonic() - begun < 20
    assert asked.count("idp.example") == 1, "one thread for a name that hangs"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000000000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffff\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000,
    ],
    ids=["body", "length", "chunk", "interim"],
)
def test_a_response_without_end_is_bounded(scripted, head, monkeypatch):
    monkeypatch.setattr(http_post, "RESPONSE_BYTES_MAX", 1 << 16)

    def flood(peer):
        with peer:
            try:
                peer.sendall(head)
                while True:
                    peer.sendall(bytes(65_536))
            except OSError:
                pass

    with pytest.raises((UsageError, UnavailableError)) as caught:
        get(url_of(scripted(flood)))
    assert caught.value.__class__ is not MemoryError
    check_no_canary(caught.value)


@pytest.mark.parametrize(
    "sent", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", b"HTTP/1.1 200 OK\r", b""]
)
def test_a_response_that_ends_early_is_unavailable(scripted, sent):
    def script(peer):
        with peer:
            peer.recv(10_000)
            peer.sendall(sent)

    with pytest.raises(UnavailableError):
        get(url_of(scripted(script)))
