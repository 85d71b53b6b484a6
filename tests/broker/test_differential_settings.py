"""Goal: settings of topics change, and are refused and shown, as in Apache Kafka.

Method: as in `test_differential`. A change of Apache Kafka is visible a moment later, so what reads
it back is repeated until it is there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.judges.coordinator_requests import create, has_coordinators, until_known
from kit.judges.differential import check_same
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.judges.conversation import Conversation
    from kit.servers.embedded import EmbeddedBroker
    from kit.servers.kafka import ApacheKafka

TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)
RETRY_S: Final = 30
KEYS: Final = ["cleanup.policy", "delete.retention.ms", "max.message.bytes"]


def _describe(
    talk: Conversation, label: str, name: str, keys: list[str] | None, *, kind: int = TOPIC
) -> Any:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    fields = {"include_synonyms": False, "include_documentation": False}
    return talk.ask(label, Api.DESCRIBE_CONFIGS, 4, resources=[resource], **fields)


def _shown(talk: Conversation, label: str, name: str, **expected: str) -> None:
    """Describe `KEYS` once those that are expected are visible."""
    deadline = time.monotonic() + RETRY_S
    while True:
        [found] = _describe(talk, label, name, KEYS).results
        values = {config.name.replace(".", "_"): config.value for config in found.configs}
        if expected.items() <= values.items():
            return
        assert time.monotonic() < deadline, values
        talk.forget_last()
        time.sleep(0.05)


def _alter(  # noqa: PLR0913  # the fields of the request
    talk: Conversation,
    label: str,
    name: str,
    *changes: tuple[str, int, str | None],
    kind: int = TOPIC,
    dry_run: bool = False,
    times: int = 1,
) -> None:
    configs = [{"name": k, "config_operation": op, "value": v} for k, op, v in changes]
    resource = {"resource_type": kind, "resource_name": name, "configs": configs}
    api = Api.INCREMENTAL_ALTER_CONFIGS
    talk.ask(label, api, 1, resources=[resource] * times, validate_only=dry_run)


def changed_settings(talk: Conversation) -> None:
    topic = create(talk, "changed", max_message_bytes="2000")
    _shown(talk, "created with one", topic, max_message_bytes="2000")
    _alter(talk, "set", topic, ("delete.retention.ms", SET, "1000000"))
    _alter(talk, "appended", topic, ("cleanup.policy", APPEND, "compact"))
    both = "delete,compact"
    _shown(talk, "set and appended", topic, delete_retention_ms="1000000", cleanup_policy=both)
    _alter(talk, "appended again", topic, ("cleanup.policy", APPEND, "compact"))
    _alter(talk, "subtracted", topic, ("cleanup.policy", SUBTRACT, "delete"))
    _shown(talk, "compact", topic, cleanup_policy="compact")
    _alter(talk, "subtracted what is not there", topic, ("cleanup.policy", SUBTRACT, "delete"))
    _alter(talk, "dry", topic, ("delete.retention.ms", SET, "2000000"), dry_run=True)
    _alter(talk, "deleted", topic, ("max.message.bytes", DELETE, None))
    _alter(talk, "deleted again", topic, ("max.message.bytes", DELETE, None))
    _alter(talk, "deleted with a value", topic, ("cleanup.policy", DELETE, "x"))
    _shown(talk, "deleted both", topic, cleanup_policy="delete", delete_retention_ms="1000000")
    replicas = "leader.replication.throttled.replicas"
    for label, operation, value in (
        ("appended to an empty list", APPEND, "0:1"),
        ("appended to a list", APPEND, "1:1"),
        ("subtracted all", SUBTRACT, "0:1,1:1"),
        ("appended to an empty list again", APPEND, "0:1"),
    ):
        _alter(talk, label, topic, (replicas, operation, value))
    configs = [{"name": "max.message.bytes", "value": "3000"}]
    resource = {"resource_type": TOPIC, "resource_name": topic, "configs": configs}
    talk.ask("replaced", Api.ALTER_CONFIGS, 2, resources=[resource], validate_only=False)
    _shown(talk, "only what was named", topic, max_message_bytes="3000")


def refused_settings(talk: Conversation) -> None:
    topic = create(talk, "refused")
    for label, change in {
        "not a number": ("delete.retention.ms", SET, "many"),
        "too small": ("max.message.bytes", SET, "-1"),
        "no policy": ("cleanup.policy", SET, "shred"),
        "unknown": ("no.such.setting", SET, "1"),
        "unknown, deleted": ("no.such.setting", DELETE, None),
        "no name": ("", SET, "1"),
        "null": ("delete.retention.ms", SET, None),
        "appended to a number": ("delete.retention.ms", APPEND, "1"),
        "appended to what is unknown": ("no.such.setting", APPEND, "1"),
        "appended null": ("cleanup.policy", APPEND, None),
        "appended what is none": ("cleanup.policy", APPEND, "shred"),
        "unknown operation": ("delete.retention.ms", 9, "1000000"),
    }.items():
        _alter(talk, label, topic, change)
    size = ("delete.retention.ms", SET, "1000000")
    _alter(talk, "named twice", topic, size, ("delete.retention.ms", DELETE, None))
    _alter(talk, "one of two is wrong", topic, size, ("max.message.bytes", SET, "x"))
    _alter(talk, "the topic twice", topic, size, times=2)
    _alter(talk, "unknown topic", talk.name("none"), size)
    _alter(talk, "bad name", "no/slash", size)
    _alter(talk, "empty name", "", size)
    _alter(talk, "unknown type", topic, size, kind=77)
    _alter(talk, "nothing", topic)
    _shown(talk, "unchanged", topic)


def refused_replacements(talk: Conversation) -> None:
    topic = create(talk, "replaced")

    def ask(label: str, name: str, *configs: tuple[str, str | None], kind: int = TOPIC) -> None:
        entries = [{"name": key, "value": value} for key, value in configs]
        resource = {"resource_type": kind, "resource_name": name, "configs": entries}
        talk.ask(label, Api.ALTER_CONFIGS, 2, resources=[resource], validate_only=False)

    ask("bad value", topic, ("delete.retention.ms", "many"))
    ask("unknown", topic, ("no.such.setting", "1"))
    ask("null", topic, ("delete.retention.ms", None))
    ask("unknown topic", talk.name("none"), ("delete.retention.ms", "1000000"))
    ask("unknown type", topic, ("delete.retention.ms", "1000000"), kind=77)


def described_settings(talk: Conversation) -> None:
    topic = create(talk, "described")
    _describe(talk, "one", topic, ["cleanup.policy"])
    _describe(talk, "unknown key", topic, ["no.such.setting"])
    _describe(talk, "one and unknown", topic, ["compression.type", "no.such.setting"])
    _describe(talk, "unknown topic", talk.name("none"), ["cleanup.policy"])
    _describe(talk, "bad name", "no/slash", ["cleanup.policy"])
    _describe(talk, "empty name", "", ["cleanup.policy"])
    _describe(talk, "broker", "1", ["num.partitions", "node.id"], kind=BROKER)
    _describe(talk, "another broker", "7", ["num.partitions"], kind=BROKER)
    _describe(talk, "not a broker", "x", ["num.partitions"], kind=BROKER)
    _describe(talk, "unknown type", topic, ["cleanup.policy"], kind=77)


def created_with_settings(talk: Conversation) -> None:
    def ask(label: str, *configs: tuple[str, str | None]) -> None:
        topic = {
            "name": talk.name("configured"),
            "num_partitions": 1,
            "replication_factor": 1,
            "assignments": [],
            "configs": [{"name": key, "value": value} for key, value in configs],
        }
        fields = {"timeout": 30_000, "validate_only": True}
        talk.ask(label, Api.CREATE_TOPICS, 4, topics=[topic], **fields)

    ask("fits", ("delete.retention.ms", "1000000"))
    ask("null", ("delete.retention.ms", None))
    ask("twice", ("delete.retention.ms", "1000000"), ("delete.retention.ms", "2000000"))
    ask("no name", ("", "1"))
    ask("out of range", ("max.message.bytes", "-1"))
    ask("too large", ("delete.retention.ms", "99999999999999999999"))
    ask("empty value", ("cleanup.policy", ""))
    ask("spaces", ("delete.retention.ms", " 1000000 "))


SCENARIOS: Final = [
    changed_settings,
    refused_settings,
    refused_replacements,
    described_settings,
    created_with_settings,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_responses_are_those_of_apache_kafka(
    scenario: Callable[[Conversation], None],
    embedded: EmbeddedBroker,
    kafka_392: ApacheKafka,
    kafka_431: ApacheKafka,
    topic_name: str,
) -> None:
    brokers = embedded, kafka_392, kafka_431
    check_same(
        scenario,
        brokers,
        topic_name,
        ready=lambda talk: until_known(lambda: has_coordinators(talk), talk),
    )
