"""For tests of your own: a store in memory, and the checker that compares source and copy."""

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
