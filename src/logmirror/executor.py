"""The process on each executor from which Spark forks its Python workers.

Spark starts it by name (`spark.python.daemon.module`) and forks a worker for each slot. What slices
need is loaded and compiled here, once, so a worker starts in milliseconds and shares the memory,
where it would otherwise take two CPU-seconds, again after every crash of one.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

from logmirror import wiring


def main() -> None:
    """Load, then serve Spark until it hangs up."""
    wiring.warm_up()
    gc.collect()
    gc.freeze()  # what is loaded stays shared: a worker's collector must not touch its pages
    manager()


if __name__ == "__main__":
    main()
