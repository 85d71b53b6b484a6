"""Connection properties by librdkafka's names, validated, as one frozen value.

Invariants:
1. Every name is used, refused with a reason, or refused as unknown with similar names: no property
   is silently ignored.
2. A secret appears in no repr, message or fact.
3. `ConnectionSettings` is picklable: it is sent to executors. Files that it names are read there. A
   secret may be a `references.Secret`, which is sent without its value.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from logmirror.cluster.refused_properties import REFUSED
from logmirror.cluster.token_url import parse_token_url
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]

SASL_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
SECURITY_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_PORT_MAX: Final = 65_535
_INT_MAX: Final = 2**31 - 1
_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """How to reach one cluster. Build it with `connection_settings`; durations are milliseconds."""

    bootstrap_servers: tuple[tuple[str, int], ...]
    """(host, port), in the order of connection attempts; never empty."""
    client_id: str = "logmirror"
    security_protocol: str = "PLAINTEXT"

    sasl_mechanism: str = ""
    sasl_username: str = ""
    sasl_password: str = field(default="", repr=False)
    oauth_method: str = "default"
    """`default`: an unsecured token from `oauth_config`; `oidc`: a token from the endpoint."""
    oauth_config: str = field(default="", repr=False)
    oauth_unsecure_jwt: bool = False
    oauth_client_id: str = ""
    oauth_client_secret: str = field(default="", repr=False)
    oauth_token_endpoint: str = field(default="", repr=False)
    oauth_scope: str = ""
    oauth_extensions: str = field(default="", repr=False)
    https_ca_location: str = ""
    """File or directory for the token endpoint; empty for the system's CA certificates."""
    https_ca_pem: str = ""

    ssl_ca_location: str = ""
    """File or directory; empty for the system's CA certificates."""
    ssl_ca_pem: str = ""
    ssl_certificate_location: str = ""
    ssl_certificate_pem: str = ""
    ssl_key_location: str = ""
    ssl_key_pem: str = field(default="", repr=False)
    """As configured; see `pem`."""
    ssl_key_password: str = field(default="", repr=False)
    ssl_cipher_suites: str = ""
    ssl_verify: bool = True
    ssl_verify_hostname: bool = True

    socket_timeout_ms: int = 30_000
    """How long one response may take, beyond the wait time in the request."""
    connect_timeout_ms: int = 10_000
    """TCP, TLS, version negotiation and authentication together."""
    request_timeout_ms: int = 30_000
    """The timeout in requests for the broker's processing."""
    socket_keepalive: bool = True
    socket_send_buffer_bytes: int = 0
    """0: the system's default, with autotuning."""
    socket_receive_buffer_bytes: int = 0
    address_family: str = "any"
    receive_message_max_bytes: int = 100_000_000
    """The largest response to accept, unless a fetch requested more."""

    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
    reconnect_backoff_ms: int = 100
    reconnect_backoff_max_ms: int = 10_000
    retry_budget_ms: int = 60_000
    """How long one operation is retried before it is an `UnavailableError`. Not a property."""
    metadata_refresh_ms: int = 300_000
    """Metadata is refreshed when it is older; -1: only when a broker refuses a request."""

    fetch_wait_max_ms: int = 500
    fetch_min_bytes: int = 1
    fetch_max_bytes: int | None = None
    """None: the reader's default."""
    max_partition_fetch_bytes: int | None = None
    check_crcs: bool = True

    @property
    def uses_tls(self) -> bool:
        """Whether connections use TLS."""
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        """Whether connections authenticate with SASL."""
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")


class PropertyProblem(NamedTuple):
    """One invalid property. Never holds the value of a secret."""

    name: str
    message: str
    """Lower case, no full stop."""
    suggestion: str
    """The correction; may be empty."""


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            message = f"expects a whole number from {low} to {high}"
            raise ValueError(message)
        return value

    return parse


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "t", "1"):
        return True
    if lowered in ("false", "f", "0"):
        return False
    message = "expects true or false"
    raise ValueError(message)


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        for value in allowed:
            if text.lower() == value.lower():
                return value
        message = f"expects one of {', '.join(allowed)}"
        raise ValueError(message)

    return parse


def _https_or_none(text: str) -> bool:
    return _choice("https", "none")(text) == "https"


def _text(text: str) -> str:
    return text


def pem(text: str) -> str:
    """Return a PEM with its line ends, which are escaped where it is on one line."""
    return text.replace("\\n", "\n")


_TIME: Final = _integer(1, 3_600_000)
_SIZE: Final = _integer(0, 100_000_000)

_KNOWN: Final[dict[str, tuple[str, Callable[[str], object]]]] = {
    "client.id": ("client_id", _text),
    "security.protocol": ("security_protocol", _choice(*SECURITY_PROTOCOLS)),
    "sasl.mechanism": ("sasl_mechanism", _choice(*SASL_MECHANISMS)),
    "sasl.mechanisms": ("sasl_mechanism", _choice(*SASL_MECHANISMS)),
    "sasl.username": ("sasl_username", _text),
    "sasl.password": ("sasl_password", _text),
    "sasl.oauthbearer.method": ("oauth_method", _choice("default", "oidc")),
    "sasl.oauthbearer.config": ("oauth_config", _text),
    "enable.sasl.oauthbearer.unsecure.jwt": ("oauth_unsecure_jwt", _boolean),
    "sasl.oauthbearer.client.id": ("oauth_client_id", _text),
    "sasl.oauthbearer.client.secret": ("oauth_client_secret", _text),
    "sasl.oauthbearer.token.endpoint.url": ("oauth_token_endpoint", _text),
    "sasl.oauthbearer.scope": ("oauth_scope", _text),
    "sasl.oauthbearer.extensions": ("oauth_extensions", _text),
    "https.ca.location": ("https_ca_location", _text),
    "https.ca.pem": ("https_ca_pem", pem),
    "ssl.ca.location": ("ssl_ca_location", _text),
    "ssl.ca.pem": ("ssl_ca_pem", pem),
    "ssl.certificate.location": ("ssl_certificate_location", _text),
    "ssl.certificate.pem": ("ssl_certificate_pem", pem),
    "ssl.key.location": ("ssl_key_location", _text),
    "ssl.key.pem": ("ssl_key_pem", _text),
    "ssl.key.password": ("ssl_key_password", _text),
    "ssl.cipher.suites": ("ssl_cipher_suites", _text),
    "ssl.endpoint.identification.algorithm": ("ssl_verify_hostname", _https_or_none),
    "enable.ssl.certificate.verification": ("ssl_verify", _boolean),
    "socket.timeout.ms": ("socket_timeout_ms", _integer(10, 300_000)),
    "socket.connection.setup.timeout.ms": ("connect_timeout_ms", _integer(1000, _INT_MAX)),
    "request.timeout.ms": ("request_timeout_ms", _integer(1, 900_000)),
    "socket.keepalive.enable": ("socket_keepalive", _boolean),
    "socket.send.buffer.bytes": ("socket_send_buffer_bytes", _SIZE),
    "socket.receive.buffer.bytes": ("socket_receive_buffer_bytes", _SIZE),
    "broker.address.family": ("address_family", _choice("any", "v4", "v6")),
    "receive.message.max.bytes": ("receive_message_max_bytes", _integer(1000, _INT_MAX)),
    "retry.backoff.ms": ("retry_backoff_ms", _integer(1, 300_000)),
    "retry.backoff.max.ms": ("retry_backoff_max_ms", _integer(1, 300_000)),
    "reconnect.backoff.ms": ("reconnect_backoff_ms", _integer(0, 3_600_000)),
    "reconnect.backoff.max.ms": ("reconnect_backoff_max_ms", _integer(0, 3_600_000)),
    "topic.metadata.refresh.interval.ms": ("metadata_refresh_ms", _integer(-1, 3_600_000)),
    "fetch.wait.max.ms": ("fetch_wait_max_ms", _integer(0, 300_000)),
    "fetch.min.bytes": ("fetch_min_bytes", _integer(1, 100_000_000)),
    "fetch.max.bytes": ("fetch_max_bytes", _integer(1, _INT_MAX - 512)),
    "max.partition.fetch.bytes": ("max_partition_fetch_bytes", _integer(1, 1_000_000_000)),
    "fetch.message.max.bytes": ("max_partition_fetch_bytes", _integer(1, 1_000_000_000)),
    "check.crcs": ("check_crcs", _boolean),
}

_ENDPOINT: Final = "sasl.oauthbearer.token.endpoint.url"
_BOOTSTRAP: Final = ("bootstrap.servers", "metadata.broker.list")

KNOWN_PROPERTIES: Final = tuple(sorted(_KNOWN))
"""The names that can be set, besides the bootstrap servers."""


def connection_settings(
    bootstrap_servers: str, properties: Mapping[str, str] | None = None
) -> ConnectionSettings:
    """Validate all properties and build the settings.

    Args:
        bootstrap_servers: "host:port,host:port"; IPv6 addresses in brackets; the default port is
            9092.
        properties: librdkafka names to values, as text.

    Raises:
        UsageError: Fact `problems` is a tuple of all `PropertyProblem`s.
    """
    values, problems = _parse(bootstrap_servers, properties or {})
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UsageError(
            f"{first.name} {first.message}{more}", hint=first.suggestion, problems=problems
        )
    return ConnectionSettings(**values)  # type: ignore[arg-type]  # each parser fits its field


def property_problems(
    bootstrap_servers: str, properties: Mapping[str, str]
) -> tuple[PropertyProblem, ...]:
    """All problems that `connection_settings` would raise; empty if there are none."""
    return _parse(bootstrap_servers, properties)[1]


def _parse(
    bootstrap_servers: str, properties: Mapping[str, str]
) -> tuple[dict[str, object], tuple[PropertyProblem, ...]]:
    values: dict[str, object] = {}
    problems: list[PropertyProblem] = []
    try:
        values["bootstrap_servers"] = parse_servers(bootstrap_servers)
    except ValueError as error:
        problems.append(PropertyProblem("bootstrap.servers", str(error), ""))
    set_by: dict[str, str] = {}
    for name, text in properties.items():
        known = _KNOWN.get(name)
        if known is None:
            problems.append(_unknown(name))
            continue
        target, parse = known
        if target in set_by:
            problems.append(PropertyProblem(name, f"means the same as {set_by[target]}", ""))
            continue
        set_by[target] = name
        try:
            values[target] = parse(text)
        except ValueError as error:
            problems.append(PropertyProblem(name, str(error), ""))
    problems += _combinations(values)
    return values, tuple(problems)


def _unknown(name: str) -> PropertyProblem:
    if name in _BOOTSTRAP:
        return PropertyProblem(name, "has its own key", "use bootstrap-servers")
    if name in REFUSED:
        return PropertyProblem(name, f"cannot be set: {REFUSED[name]}", "remove it")
    nearest = difflib.get_close_matches(name, [*KNOWN_PROPERTIES, *_java_names()], n=3, cutoff=0.6)
    nearest = list(dict.fromkeys(_java_names().get(one, one) for one in nearest))
    suggestion = f"did you mean {' or '.join(nearest)}?" if nearest else ""
    return PropertyProblem(name, "is an unknown property", suggestion)


def _java_names() -> dict[str, str]:
    """Names of the Java client that differ from librdkafka's."""
    return {
        "fetch.max.wait.ms": "fetch.wait.max.ms",
        "receive.buffer.bytes": "socket.receive.buffer.bytes",
        "send.buffer.bytes": "socket.send.buffer.bytes",
        "metadata.max.age.ms": "topic.metadata.refresh.interval.ms",
        "socket.connection.setup.timeout.max.ms": "socket.connection.setup.timeout.ms",
        "ssl.truststore.location": "ssl.ca.location",
        "ssl.truststore.certificates": "ssl.ca.pem",
        "ssl.keystore.certificate.chain": "ssl.certificate.pem",
        "ssl.keystore.key": "ssl.key.pem",
        "sasl.jaas.config": "sasl.username",
    }


def parse_servers(text: str) -> tuple[tuple[str, int], ...]:
    """Parse a list of servers to (host, port).

    Raises:
        ValueError: The list is empty or an entry is not host:port.
    """
    servers = tuple(_server(entry.strip()) for entry in text.split(",") if entry.strip())
    if not servers:
        message = "is empty, expects host:port"
        raise ValueError(message)
    return servers


def _server(entry: str) -> tuple[str, int]:
    bare = entry.partition("://")[2] or entry  # librdkafka allows PLAINTEXT://host:port
    host, colon, port = bare.rpartition(":")
    if not colon or "]" in port:
        host, port = bare, "9092"
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not port.isascii() or not port.isdigit():
        message = f"has an entry that is not host:port: {entry!r}"
        raise ValueError(message)
    if not 0 < int(port) <= _PORT_MAX:
        message = f"has a port outside 1..65535: {entry!r}"
        raise ValueError(message)
    return host, int(port)


def _combinations(values: Mapping[str, object]) -> list[PropertyProblem]:
    """Problems of properties in combination."""
    problems = []
    protocol = values.get("security_protocol", "PLAINTEXT")
    mechanism = values.get("sasl_mechanism", "")
    sasl = str(protocol).startswith("SASL_")
    if sasl and not mechanism and "sasl_mechanism" not in values:
        listed = ", ".join(SASL_MECHANISMS)
        problems.append(PropertyProblem("sasl.mechanism", "is missing", f"one of {listed}"))
    if not sasl and (mechanism or values.get("sasl_username") or values.get("sasl_password")):
        what = f"has no effect with security.protocol {protocol}"
        hint = "set security.protocol to SASL_SSL or SASL_PLAINTEXT"
        problems.append(PropertyProblem("sasl.mechanism", what, hint))
    if sasl and mechanism in SASL_MECHANISMS[:3]:
        for name, key in (("sasl.username", "sasl_username"), ("sasl.password", "sasl_password")):
            if not values.get(key):
                problems.append(PropertyProblem(name, f"is missing for {mechanism}", ""))
    if sasl and mechanism == "OAUTHBEARER":
        problems += _oauth(values)
    problems += _https(values, asks_endpoint=sasl and mechanism == "OAUTHBEARER")
    if protocol in ("PLAINTEXT", "SASL_PLAINTEXT"):
        tls = [
            name for name, (key, _) in _KNOWN.items() if key.startswith("ssl_") and key in values
        ]
        if tls:
            what = f"has no effect with security.protocol {protocol}"
            problems.append(
                PropertyProblem(tls[0], what, "set security.protocol to SSL or SASL_SSL")
            )
    if ("ssl_key_location" in values or "ssl_key_pem" in values) and not (
        "ssl_certificate_location" in values or "ssl_certificate_pem" in values
    ):
        what = "is missing although a key is set"
        problems.append(PropertyProblem("ssl.certificate.location", what, ""))
    return problems


def _https(values: Mapping[str, object], *, asks_endpoint: bool) -> list[PropertyProblem]:
    if asks_endpoint and values.get("oauth_method") == "oidc":
        return []
    what = "has no effect without a token endpoint"
    hint = "set sasl.mechanism to OAUTHBEARER and sasl.oauthbearer.method to oidc"
    names = ("https.ca.location", "https.ca.pem")
    return [PropertyProblem(name, what, hint) for name in names if _KNOWN[name][0] in values]


def _oauth(values: Mapping[str, object]) -> list[PropertyProblem]:
    if values.get("oauth_method") != "oidc":
        if values.get("oauth_unsecure_jwt"):
            return []
        what = "is required for unsigned tokens"
        hint = "set it to true, or sasl.oauthbearer.method to oidc"
        return [PropertyProblem("enable.sasl.oauthbearer.unsecure.jwt", what, hint)]
    problems = [
        PropertyProblem(name, "is missing for sasl.oauthbearer.method oidc", "")
        for name in (
            "sasl.oauthbearer.client.id",
            "sasl.oauthbearer.client.secret",
            _ENDPOINT,
        )
        if not values.get(_KNOWN[name][0])
    ]
    url = str(values.get("oauth_token_endpoint") or "")
    try:
        if url:
            parse_token_url(url)
    except ValueError as error:
        hint = "http is accepted for this machine only"
        problems.append(
            PropertyProblem(_ENDPOINT, str(error), hint if "https" in str(error) else "")
        )
    return problems
