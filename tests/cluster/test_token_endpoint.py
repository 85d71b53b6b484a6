"""Tokens from an endpoint: where the secret goes, how long a request takes, how often it is made.

Method: real HTTP and HTTPS servers on loopback. Some speak HTTP by a library, some send bytes as a
test says. Canary secrets are searched in whatever a failure shows.
"""

import base64
import http.server
import json
import pickle
import socket
import ssl
import threading
import time
import traceback
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import pytest

from kit.fakes.scripted import SteppingClock
from kit.servers.security import make_certificates
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster import http_post, oauth
from logmirror.cluster.properties import connection_settings, property_problems
from logmirror.cluster.sasl import authenticate
from logmirror.cluster.token_endpoint import RETRY_AFTER_MS_MAX, Tokens
from logmirror.errors import UnavailableError, UsageError

SECRET = "canary-s3cret"
TOKEN = "canary-t0ken"
QUERY = "canary-qu3ry"
GOOD = (200, {}, json.dumps({"access_token": TOKEN, "expires_in": 100}).encode())


class Endpoint(http.server.ThreadingHTTPServer):
    """Responds with `responses` in turn, the last one again and again; `asked` is what came."""

    def __init__(self, *responses):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.responses, self.asked, self.delay_s, self.lock = (
            [*responses],
            [],
            0.0,
            threading.Lock(),
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            one = self.server.responses
            status, headers, content = one.pop(0) if len(one) > 1 else one[0]
        time.sleep(self.server.delay_s)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):  # what a followed redirect would send
        self.do_POST()

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """Start an endpoint that responds as given."""
    opened = []

    def serve(*responses, tls=None):
        server = Endpoint(*(responses or (GOOD,)))
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        opened.append((server, thread))
        return server

    yield serve
    for server, thread in opened:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def scripted():
    """Start a listener that carries out a function with each connection; return its port."""
    listeners = []

    def scripted(script):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept():
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=script, args=(peer,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return listener.getsockname()[1]

    yield scripted
    for listener in listeners:
        listener.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def settings_for(url, **properties):
    oidc = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "mirror",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.token.endpoint.url": url,
    }
    return connection_settings("h:1", {**oidc, **properties})


def url_of(server, scheme="http"):
    port = server if isinstance(server, int) else server.server_port
    return f"{scheme}://127.0.0.1:{port}/token?key={QUERY}"


def get(url, *, tokens=None, within_ms=10_000, clock=SYSTEM_CLOCK, **properties):
    deadline_ms = clock.monotonic_ms() + within_ms
    settings = settings_for(url, **properties)
    return (tokens or Tokens()).get(settings, clock, deadline_ms=deadline_ms)


def check_no_canary(error):
    """No secret is in what a log, a report or a pickled error would show."""
    shown = "".join(traceback.format_exception(error))
    shown += f"{error!r} {error} {error.facts} {error.hint} {pickle.dumps(error)!r}"
    encoded = base64.b64encode(f"mirror:{SECRET}".encode()).decode()
    assert [one for one in (SECRET, TOKEN, QUERY, encoded) if one in shown] == []


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
    assert time.monotonic() - begun < 3
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
    assert time.monotonic() - begun < 5
    assert asked == ["idp.example"], "one thread for a name that hangs"


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


# -- which responses are retried -------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_busy_endpoint_is_unavailable_and_then_responds(serve, status):
    endpoint = serve((status, {}, TOKEN.encode()), GOOD)
    tokens = Tokens()
    with pytest.raises(UnavailableError) as caught:
        get(url_of(endpoint), tokens=tokens)
    assert caught.value.facts["status"] == status
    check_no_canary(caught.value)
    assert get(url_of(endpoint), tokens=tokens).text == TOKEN


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_is_a_usage_error(serve, status):
    endpoint = serve((status, {"Retry-After": "9"}, SECRET.encode()))
    with pytest.raises(UsageError, match="refused") as caught:
        get(url_of(endpoint))
    check_no_canary(caught.value)


@pytest.mark.parametrize(
    ("header", "low_ms", "high_ms"),
    [
        ("7", 7000, 7000),
        ("999999", RETRY_AFTER_MS_MAX, RETRY_AFTER_MS_MAX),
        ("date", 25_000, 31_000),
    ],
)
def test_retry_after_is_honoured_and_bounded(serve, header, low_ms, high_ms):
    clock = SteppingClock(SYSTEM_CLOCK.now_ms())
    after = formatdate(clock.now_ms() / 1000 + 30, usegmt=True) if header == "date" else header
    endpoint = serve((429, {"Retry-After": after}, b""), GOOD)
    tokens = Tokens()

    def ask():
        return get(url_of(endpoint), tokens=tokens, clock=clock)

    with pytest.raises(UnavailableError) as caught:
        ask()
    wait_ms = caught.value.facts["retry_after_ms"]
    assert low_ms <= wait_ms <= high_ms
    clock.sleep_ms(wait_ms - 2)
    with pytest.raises(UnavailableError):
        ask()
    assert len(endpoint.asked) == 1
    clock.sleep_ms(2)
    assert ask().text == TOKEN


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"access_token": 7}',
        b'{"access_token": ""}',
        b'{"access_token": "a\\u0001auth=b"}',
        b"[" * 100_000,
    ],
)
def test_a_response_without_a_token_is_a_usage_error(serve, body):
    with pytest.raises(UsageError, match="no access_token"):
        get(url_of(serve((200, {}, body))))


# -- how often it is asked -------------------------------------------------------------------------


def test_many_threads_ask_once(serve):
    endpoint, tokens = serve(), Tokens()
    endpoint.delay_s = 0.3
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: get(url_of(endpoint), tokens=tokens), range(40)))
    assert {token.text for token in found} == {TOKEN}
    assert len(endpoint.asked) == 1


def test_many_threads_share_one_failure_and_each_gets_its_own_error(serve):
    endpoint, tokens = serve((503, {}, b"")), Tokens()
    endpoint.delay_s = 0.5

    def ask(_):
        with pytest.raises(UnavailableError) as caught:
            get(url_of(endpoint), tokens=tokens)
        return caught.value

    with ThreadPoolExecutor(10) as pool:
        errors = list(pool.map(ask, range(10)))
    assert len(endpoint.asked) == 1
    assert len({id(error) for error in errors}) == 10


@pytest.mark.parametrize(
    ("expires_in", "kept_ms"), [(100, 80_000), ("100", 80_000), (10**8, 69_120_000)]
)
def test_a_token_is_kept_for_80_percent_of_its_lifetime(serve, expires_in, kept_ms):
    content = json.dumps({"access_token": TOKEN, "expires_in": expires_in}).encode()
    endpoint, tokens, clock = serve((200, {}, content)), Tokens(), SteppingClock(0)

    def ask():
        return get(url_of(endpoint), tokens=tokens, clock=clock).is_cached

    assert not ask()
    clock.sleep_ms(kept_ms - 100)
    assert ask()
    clock.sleep_ms(100)
    assert not ask()
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize("expires_in", [None, 0, -5, True, "soon", [], 1.5])
def test_a_token_of_unknown_lifetime_is_not_kept(serve, expires_in):
    content = json.dumps({"access_token": TOKEN, "expires_in": expires_in}).encode()
    endpoint, tokens = serve((200, {}, content)), Tokens()
    assert [get(url_of(endpoint), tokens=tokens).is_cached for _ in "ab"] == [False, False]
    assert len(endpoint.asked) == 2


def test_other_credentials_get_another_token(serve):
    endpoint, tokens = serve(), Tokens()
    get(url_of(endpoint), tokens=tokens)
    get(url_of(endpoint), tokens=tokens, **{"sasl.oauthbearer.client.id": "other"})
    get(url_of(endpoint), tokens=tokens, **{"client.id": "same credentials"})
    assert len(endpoint.asked) == 2


def test_a_cached_token_that_a_broker_refuses_is_replaced(serve):
    endpoint = serve()
    settings = settings_for(url_of(endpoint))
    sent = []

    def accepts(data):
        sent.append(data)
        return b""

    def refuses(_):
        raise UsageError("authentication failed", code=58)

    def run(exchange):
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + 5000
        authenticate(settings, SYSTEM_CLOCK, exchange, deadline_ms=deadline_ms)

    run(accepts)
    with pytest.raises(UnavailableError, match="cached token"):
        run(refuses)
    with pytest.raises(UsageError):  # a new token: trying again does not help
        run(refuses)
    run(accepts)
    assert len(endpoint.asked) == 3
    assert all(TOKEN.encode() in data for data in sent)


# -- what is shown ---------------------------------------------------------------------------------


def unsigned(settings):
    return oauth.oauth_token(settings, SYSTEM_CLOCK, deadline_ms=0)


@pytest.mark.parametrize(
    ("name", "text", "use"),
    [
        ("sasl.oauthbearer.config", f"principal=me {SECRET}", oauth.oauth_extensions),
        ("sasl.oauthbearer.config", f"principal=me {SECRET}=x", unsigned),
        ("sasl.oauthbearer.extensions", f"a=b,{SECRET}", oauth.oauth_extensions),
    ],
)
def test_entries_of_a_property_are_named_by_their_number(name, text, use):
    properties = {name: text}
    if name.endswith("config"):
        properties |= {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "enable.sasl.oauthbearer.unsecure.jwt": "true",
        }
        settings = connection_settings("h:1", properties)
    else:
        settings = settings_for("https://idp.example/", **properties)
    with pytest.raises(UsageError, match=name.replace(".", r"\.")) as caught:
        use(settings)
    assert caught.value.facts == {"entry": 2}
    check_no_canary(caught.value)
    assert SECRET not in repr(settings)


def test_the_repr_of_settings_has_no_secret():
    settings = settings_for(f"https://idp.example/?key={QUERY}")
    assert [one for one in (SECRET, QUERY) if one in repr(settings)] == []
