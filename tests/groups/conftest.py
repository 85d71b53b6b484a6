"""Two clusters: the source of groups, and the target of their translation."""

import pytest

from kit.runs.group_links import SYNCS
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic


@pytest.fixture(scope="module")
def brokers(tmp_path_factory):
    with (
        EmbeddedBroker(tmp_path_factory.mktemp("source")) as source,
        EmbeddedBroker(tmp_path_factory.mktemp("target")) as target,
    ):
        create_topic(source.bootstrap, SYNCS, 1, {})
        yield source, target


@pytest.fixture
def servers(brokers):
    return brokers[0].bootstrap, brokers[1].bootstrap
