"""For your own tests: a broker, a store in memory, and a checker that compares replicas."""

from logmirror.testing.checker import Anomaly, History, Row, Truth, check_tiles, compare
from logmirror.testing.local_broker import LocalBroker, broker
from logmirror.testing.memory_store import MemoryStagedObject, MemoryStore

__all__ = [
    "Anomaly",
    "History",
    "LocalBroker",
    "MemoryStagedObject",
    "MemoryStore",
    "Row",
    "Truth",
    "broker",
    "check_tiles",
    "compare",
]
