"""Embedded brokers for tests that only talk to them, with log dirs of both kinds.

A test of the broker `embedded`, `secured` or `limited` runs in a directory. With the marker
`in_bucket` the gate runs it on a log dir in a bucket too; with `in_bucket(tier="test")` also `make
test`. A test of a broker of its own with a `log_bucket` runs on both in `make test`; with the
marker, on a bucket in the gate only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kit.servers.embedded import EmbeddedBroker
from kit.servers.s3 import LogBucket, S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIERS: Final = {
    "gate": pytest.mark.gate("the same clients on a log dir in a bucket"),
    "test": pytest.mark.slow,
}
_SHARED: Final = {"embedded": "package", "secured": "package", "limited": "module"}
"""Fixtures with a broker that tests share, and their scopes."""

_SMALL: Final = {"segment_bytes": 200_000}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat tests on a log dir in a bucket."""
    marker = metafunc.definition.get_closest_marker("in_bucket")
    tier = marker.kwargs.get("tier", "gate") if marker is not None else None
    if "log_bucket" in metafunc.fixturenames:
        metafunc.parametrize("log_bucket", _places(tier or "test"), indirect=True)
    elif tier is not None:
        for name in _SHARED.keys() & metafunc.fixturenames:
            metafunc.parametrize(name, _places(tier), indirect=True, scope=_SHARED[name])


def _places(tier: str) -> list[object]:
    return ["directory", pytest.param("bucket", marks=_TIERS[tier])]


@pytest.fixture(scope="package")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """A new bucket."""
    return s3_server.new_bucket()


@pytest.fixture
def log_bucket(request: pytest.FixtureRequest) -> LogBucket | None:
    """The kinds of log dirs in turn: a directory is None."""
    if request.param == "directory":
        return None
    return LogBucket(request.getfixturevalue("s3_server"), request.getfixturevalue("bucket"))


@pytest.fixture(scope="package")
def embedded_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """See `embedded`."""
    yield from _running(EmbeddedBroker(tmp_path_factory.mktemp("embedded"), **_SMALL))


@pytest.fixture(scope="package")
def embedded_in_bucket(
    tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server
) -> Iterator[EmbeddedBroker]:
    """See `embedded`."""
    place = LogBucket(s3_server, s3_server.new_bucket())
    yield from _running(EmbeddedBroker(tmp_path_factory.mktemp("embedded"), bucket=place, **_SMALL))


def _running(broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    with broker:
        yield broker
    assert broker.stop() == 0


@pytest.fixture(scope="package")
def embedded(request: pytest.FixtureRequest) -> EmbeddedBroker:
    """A running embedded broker with default options but small segments; it must never die."""
    kind = getattr(request, "param", "directory")
    name = "embedded_in_bucket" if kind == "bucket" else "embedded_on_disk"
    broker: EmbeddedBroker = request.getfixturevalue(name)
    return broker
