"""For your own tests: a store in memory, and a checker that compares a replica with its source."""

from logmirror.testing.checker import Anomaly, History, Row, Truth, check_tiles, compare
from logmirror.testing.memory_store import MemoryStagedObject, MemoryStore

__all__ = [
    "Anomaly",
    "History",
    "MemoryStagedObject",
    "MemoryStore",
    "Row",
    "Truth",
    "check_tiles",
    "compare",
]
