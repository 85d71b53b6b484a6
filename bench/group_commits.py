"""Commit offsets of many consumer groups, until its standard input ends.

    group_commits.py BOOTSTRAP TOPIC PARTITIONS GROUPS SECONDS

Every group commits once. Then `committed` is printed, and every third group commits again and
again, each once in so many seconds, one record further each time. At the end the number of these
commits is printed, and the seconds that they took.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from logmirror.cluster.client import ClusterClient  # noqa: E402  # after the path is set
from logmirror.cluster.groups import GroupOffset  # noqa: E402  # as above
from logmirror.cluster.properties import connection_settings  # noqa: E402  # as above
from logmirror.model import TopicPartition  # noqa: E402  # as above

ACTIVE = 3
"""One group of so many commits again and again."""


def main() -> None:
    """Commit, and print how many commits there were."""
    bootstrap, topic, partitions, groups, seconds = sys.argv[1:]
    every = [TopicPartition(topic, number) for number in range(int(partitions))]
    active = range(0, int(groups), ACTIVE)
    ended = threading.Event()
    with ClusterClient(connection_settings(bootstrap, {})) as client:
        for number in range(int(groups)):
            _commit(client, number, every, 0)
        print("committed", flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        began, pause_s = time.monotonic(), float(seconds) / len(active)
        for count in itertools.count():
            if ended.wait(max(began + count * pause_s - time.monotonic(), 0)):
                break
            turn, position = divmod(count, len(active))
            _commit(client, active[position], every, turn + 1)
        print(count, time.monotonic() - began, flush=True)


def _commit(client: ClusterClient, group: int, every: list[TopicPartition], offset: int) -> None:
    name = f"group-{group:04}"
    errors = client.groups.commit(name, {one: GroupOffset(offset, -1, "") for one in every})
    if any(errors.values()):
        message = f"could not commit for {name}: {errors}"
        raise RuntimeError(message)


if __name__ == "__main__":
    main()
