"""Tokens from an endpoint: which failures are retried, and how often it is asked.

Method: a real HTTP server on loopback. Canary secrets are searched in whatever a failure shows.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import pytest

from kit.fakes.scripted import SteppingClock
from kit.fakes.token_endpoint import (
    GOOD,
    QUERY,
    SECRET,
    TOKEN,
    check_no_canary,
    get,
    settings_for,
    url_of,
)
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster import oauth
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.sasl import authenticate
from logmirror.cluster.token_endpoint import RETRY_AFTER_MS_MAX, Tokens
from logmirror.errors import UnavailableError, UsageError

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
