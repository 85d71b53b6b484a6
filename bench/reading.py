"""How the benchmarks read with kcat."""

from __future__ import annotations

TO_THE_END = ("-q", "-e", "-X", "fetch.wait.max.ms=5")
"""Options of kcat. It sees the end of a partition by an empty response, which takes 500 ms unless
something else is said: as long as reading a gigabyte."""
