"""docs/broker-protocol.md lists the APIs that the broker and Apache Kafka 4.3.1 advertise.

Method: both are asked for their versions, and the responses are compared with the page's tables.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kit.judges.raw_client import RawClient
from logmirror.broker.apis import ADVERTISED_FROM, VERSIONS, Api

PAGE: Final = (Path(__file__).resolve().parents[3] / "docs" / "broker-protocol.md").read_text()
_IMPLEMENTED: Final = re.compile(
    r"^\| (\d+) \| (\w+) \| ([\d to]+) \| ([\d to]+) \| .*\|$", re.MULTILINE
)
_OTHERS: Final = re.compile(
    r"^\| (\d+) \| (\w+) \| ([\d to]+) \| ([^|]*[a-z][^|]*) \|$", re.MULTILINE
)


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition(" to ")
    return int(first), int(last or first)


def _advertised(bootstrap: str) -> dict[int, tuple[int, int]]:
    with RawClient(int(bootstrap.rpartition(":")[2])) as client:
        fields = {"client_software_name": "test", "client_software_version": "1"}
        found = client.ask(Api.API_VERSIONS, 3, **fields).api_keys
    return {int(one.api_key): (one.min_version, one.max_version) for one in found}


def test_the_broker_has_the_apis_of_the_page(embedded):
    rows = {int(key): _span(here) for key, _, here, _ in _IMPLEMENTED.findall(PAGE)}
    names = {int(key): name for key, name, _, _ in _IMPLEMENTED.findall(PAGE)}

    assert rows == {int(key): versions for key, versions in VERSIONS.items()}
    assert names == {int(api): api.name.replace("_", " ").title().replace(" ", "") for api in Api}
    advertised = {
        key: (ADVERTISED_FROM.get(key, first), last) for key, (first, last) in rows.items()
    }
    assert _advertised(embedded.bootstrap) == advertised


def test_apache_kafka_has_the_apis_of_the_page(kafka_431):
    rows = {int(key): _span(there) for key, _, _, there in _IMPLEMENTED.findall(PAGE)}
    rows |= {int(key): _span(there) for key, _, there, _ in _OTHERS.findall(PAGE)}

    assert rows == _advertised(kafka_431.bootstrap)
