"""Shared fixtures: brokers of Apache Kafka, its tools, new topic names.

A broker starts with the first test that uses it and stops after the last test. Tests share brokers,
so each test has its own topics.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import secrets
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from kit.servers.apache import RELEASES, VERSIONS, ApacheTools
from kit.servers.kafka import ApacheKafka
from kit.servers.machine import remove_temporary_folder
from kit.servers.security import PASSWORD, USER, Certificates, make_certificates, secure_listeners
from kit.servers.shared import SharedKafka
from kit.tiers import is_selected

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and every process that a test starts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
_SHARED_BROKERS = frozenset({"kafka_392", "kafka_431", "secure_kafka"})
_SHARING = _SHARED_BROKERS | {"apache_kafka", "own_kafka", "source"}


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers: rows of pages that list tests, and those of `kit.tiers`."""
    config.addinivalue_line("markers", "mirror_v3(*ids): tests of mirror-v3 that this test matches")
    config.addinivalue_line("markers", "statement(*ids): shows rows of docs/broker-statements.md")
    config.addinivalue_line("markers", "move(*ids): shows statements E of moves between log dirs")
    config.addinivalue_line("markers", "gate(reason): runs in .ci/run after `make test`")
    config.addinivalue_line("markers", "thinned: runs smaller in `make test`, in full in .ci/run")
    config.addinivalue_line("markers", "slow: not in `make check`")
    config.addinivalue_line("markers", "in_bucket(tier): see tests/broker/conftest.py")
    config.addinivalue_line("markers", "jvm: starts a JVM")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config,
    items: list[pytest.Item],
) -> Generator[None, object, object]:
    """Keep the tests that share a broker in one process, so that each broker starts only once.

    Holds for `pytest --dist loadgroup`; the other processes run other tests meanwhile. With
    `--no-loadscope-reorder` groups of minutes come first, and the many tests that belong to no
    group fill the gaps at the end.
    """
    left_out = [item for item in items if not is_selected(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if is_selected(item)]
    for item in items:
        brokers = _SHARED_BROKERS.intersection(getattr(item, "fixturenames", ()))
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "apache_kafka" in parameters:
            brokers |= {_fixture_of(parameters["apache_kafka"])}
        if brokers and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("+".join(sorted(brokers))))
    result = yield
    items.sort(key=_place)
    return result


def _place(item: pytest.Item) -> int:
    """Before all others: tests that start Spark, whole clusters, or many processes."""
    if {"e2e", "demo"}.intersection(item.path.parts) or item.path.name == "test_readme.py":
        return 0
    if item.get_closest_marker("xdist_group"):
        return 1
    return 2 if item.get_closest_marker("timeout") else 3  # long ones first


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Name what differs between two mappings of records, of which pytest would print all."""
    if op != "==" or not isinstance(left, dict) or not isinstance(right, dict):
        return None
    places = left.keys() | right.keys()
    if not all(isinstance(place, tuple) for place in places):
        return None
    absent = "absent"
    differs = [at for at in places if left.get(at, absent) != right.get(at, absent)]
    differing = sorted(differs, key=str)
    shown = [
        f"{at}: {str(left.get(at, absent))[:60]} == {str(right.get(at, absent))[:60]}"
        for at in differing[:20]
    ]
    head = f"{len(left)} == {len(right)} records, of which {len(differing)} differ:"
    return [head, *shown]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep Python's garbage collector from visiting the thousands of tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Delete the leftovers of killed programs; fixtures have ended all of them."""
    remove_temporary_folder()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Pause the shared brokers after each group of tests, until the next one that uses them.

    And return freed memory to the system, which the C library (glibc) keeps: processes that run
    many tests had up to 2 GB, and all of them together with their servers 18 GB.
    """
    if _SHARING.intersection(getattr(item, "fixturenames", ())):
        for broker in SharedKafka.all:
            broker.wake()
    result = yield
    if nextitem is not None and _group(nextitem) != _group(item):
        for broker in SharedKafka.all:
            broker.sleep()
    if _TRIM is not None and nextitem is not None and nextitem.path != item.path:
        _TRIM(0)
    return result


def _group(item: pytest.Item) -> object:
    mark = item.get_closest_marker("xdist_group")
    return mark and mark.args


def _fixture_of(version: str) -> str:
    return "kafka_" + version.replace(".", "")


# Every push draws the same examples, so that failures repeat; nights search further:
# LOGMIRROR_HYPOTHESIS=exhaustive. No deadline per example: machines are busy.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("push", deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile(
    "exhaustive", deadline=None, max_examples=5000, suppress_health_check=_SLOW
)
settings.load_profile(os.environ.get("LOGMIRROR_HYPOTHESIS", "push"))


def _broker(version: str, factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    broker = SharedKafka(version, factory.mktemp(f"kafka-{version}"))
    try:
        yield broker.start()
    finally:
        broker.remove()


@pytest.fixture(scope="session")
def kafka_392(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """A running broker of Apache Kafka 3.9.2."""
    yield from _broker("3.9.2", tmp_path_factory)


@pytest.fixture(scope="session")
def kafka_431(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """A running broker of Apache Kafka 4.3.1."""
    yield from _broker("4.3.1", tmp_path_factory)


@pytest.fixture(scope="session", params=VERSIONS)
def apache_kafka(request: pytest.FixtureRequest) -> ApacheKafka:
    """A running broker of each release in turn: the test runs once with each."""
    broker = request.getfixturevalue(_fixture_of(request.param))
    assert isinstance(broker, ApacheKafka)
    return broker


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of a private CA."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def secure_kafka(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[ApacheKafka]:
    """A running broker with the TLS and SASL listeners of `kit.servers.security`."""
    broker = SharedKafka(
        "4.3.1",
        tmp_path_factory.mktemp("kafka-secure"),
        listeners=secure_listeners(certificates),
        scram_users=[(USER, PASSWORD)],
    )
    try:
        yield broker.start()
    finally:
        broker.remove()


@pytest.fixture(scope="session", params=RELEASES)
def apache_tools(request: pytest.FixtureRequest) -> ApacheTools:
    """The console tools of a release, for the broker of the test's choice."""
    return ApacheTools(request.param)


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> str:
    """A legal and unique topic name, which contains the test's name."""
    words = re.sub(r"[^a-zA-Z0-9]+", "-", request.node.name).strip("-")[:60]
    return f"{words}-{secrets.token_hex(4)}"
