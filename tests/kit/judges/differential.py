"""The same conversation with the embedded broker and with Apache Kafka 3.9.2 and 4.3.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kit.judges.conversation import Conversation

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.servers.embedded import EmbeddedBroker
    from kit.servers.kafka import ApacheKafka

_SEQUENCE: Final = "Produce that is refused for its sequence or epoch"
_DRY: Final = "CreateTopics with `validate_only`"
DEVIATIONS: Final[dict[tuple[str, str], str]] = {
    ("idempotent_producers", "a gap"): _SEQUENCE,
    ("idempotent_producers", "older epoch"): _SEQUENCE,
    ("idempotent_producers", "later epoch, not 0"): _SEQUENCE,
    ("transactions_of_version_2", "begins with 3"): _SEQUENCE,
    ("bad_topics", "fits"): _DRY,
    ("bad_topics", "assigned"): _DRY,
    ("refused_settings", "unknown operation"): "IncrementalAlterConfigs, unknown operation",
    ("refused_settings", "the topic twice"): "IncrementalAlterConfigs, the same resource twice",
    ("described_settings", "broker"): "DescribeConfigs of the broker",
    ("created_with_settings", "twice"): "CreateTopics, a setting twice",
    ("created_with_settings", "empty value"): "an empty `cleanup.policy`",
    ("created_with_settings", "spaces"): "spaces around the value of a setting",
    ("metadata_of_what_is_not_there", "without both"): "Metadata, neither name nor topic ID",
    ("refused_batches", "cut off"): "Produce, a batch that is shorter than its length says",
    ("refused_batches", "without a key"): "Produce, no key for a compacted topic",
    ("refused_batches", "unknown codec"): "Produce, an unknown codec",
}
"""By scenario and label: the row of docs/broker-protocol.md for a response that differs."""


def check_same(
    scenario: Callable[[Conversation], None],
    brokers: tuple[EmbeddedBroker, *tuple[ApacheKafka, ...]],
    prefix: str,
    *,
    ready: Callable[[Conversation], None] = lambda _: None,
) -> None:
    """Hold a conversation with each broker, and compare the responses by label.

    Args:
        scenario: The conversation.
        brokers: The embedded broker, and releases of Apache Kafka, usually 3.9.2 and 4.3.1. Each
            response of the first must be that of one of the others.
        prefix: Begins each name of the conversation.
        ready: Waits until a broker that has just started can respond.
    """
    heard = []
    for broker in brokers:
        port = int(broker.bootstrap.rpartition(":")[2])
        with Conversation(port, prefix) as talk:
            ready(talk)  # takes producer ID 0, which also stands for none in responses
        with Conversation(port, prefix) as talk:
            scenario(talk)
            heard.append(talk.heard)
    ours, *theirs = heard
    labels = [label for label, _ in ours]
    assert all([label for label, _ in each] == labels for each in theirs)
    found: dict[str, Any] = {
        label: {"ours": response, "Apache Kafka": released}
        for (label, response), *others in zip(ours, *theirs, strict=True)
        if response not in (released := [other for _, other in others])
    }
    listed = {label for name, label in DEVIATIONS if name == scenario.__name__}
    new = {label: found[label] for label in found if label not in listed}
    assert new == {}, f"deviations without a row: {new}"
    assert listed - set(found) == set(), "no longer deviations"
