"""Rebalances of many consumer groups at once, beside Apache Kafka 4.3.1; JSON on stdout.

    python bench/broker_groups.py [--rounds N] [--groups N] [--members N] [--without-kafka]

All members of all groups join again with a changed subscription, at the same time. A rebalance
lasts from the first JoinGroup request until the last member has its SyncGroup response in the new
generation. Each member has a connection of its own, because a JoinGroup request that waits holds up
those behind it. `group_members.py` is the client, a process for each broker; the brokers take
turns, and the other one keeps its idle connections.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from kit.servers.kafka import ApacheKafka  # noqa: E402  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = "4.3.1"
MIB = 2**20
SPARE_FILES = 400
"""Descriptors of a process beside its connections."""

KAFKA = {"offsets.topic.num.partitions": 50}  # its default; the tests' own is 1


@dataclass(frozen=True)
class Contestant:
    """A broker and the process of its clients."""

    name: str
    process: psutil.Process
    members: subprocess.Popen[str]

    def asked(self, word: str) -> dict[str, float]:
        """Let the members do something; returns what they report, and the broker's CPU and size."""
        before_s = self.cpu_s()
        print(word, file=self.members.stdin, flush=True)
        line = self.members.stdout.readline()
        if not line:
            message = f"{self.name}: the clients ended"
            raise RuntimeError(message)
        found = json.loads(line)
        found["broker_cpu_s"] = self.cpu_s() - before_s
        found["rss_mib"] = self.process.memory_info().rss / MIB
        return found

    def cpu_s(self) -> float:
        return sum(self.process.cpu_times()[:2])


@contextmanager
def logmirror(folder: Path, connections: int) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "logmirror", "broker", "--listen", "127.0.0.1:0"]
    command += ["--log-dir", str(folder), "--log-level", "error"]
    command += ["--max-connections", str(connections)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            yield broker.stdout.readline().split()[-1], psutil.Process(broker.pid)
        finally:
            broker.terminate()


@contextmanager
def members(bootstrap: str, groups: int, size: int, prefix: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "group_members.py"), bootstrap]
    command += [str(groups), str(size), prefix]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def contestants(stack: ExitStack, folder: Path, options: argparse.Namespace) -> list[Contestant]:
    connections = options.groups * options.members + SPARE_FILES
    servers = [("logmirror", *stack.enter_context(logmirror(folder / "logmirror", connections)))]
    if not options.without_kafka:
        broker = ApacheKafka(VERSION, folder / "kafka", config=KAFKA, jvm=(), heap="1g")
        stack.enter_context(broker)
        servers.append(("Kafka", broker.bootstrap, psutil.Process(broker.pid)))
    found = []
    for name, bootstrap, process in servers:
        clients = members(bootstrap, options.groups, options.members, f"bench-{name}")
        found.append(Contestant(name, process, stack.enter_context(clients)))
    return found


def most_groups(wanted: int, size: int) -> int:
    """As many groups as the limit of open files allows; the embedded broker takes half of it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (
        wanted if hard == resource.RLIM_INFINITY else min(wanted, (hard - SPARE_FILES) // 2 // size)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--without-kafka", action="store_true")
    options = parser.parse_args()
    options.groups = most_groups(options.groups, options.members)
    found: dict[str, dict[str, list[dict[str, float]]]] = {"first": {}, "rebalance": {}}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        brokers = contestants(stack, Path(name), options)
        for number in range(options.rounds + 2):
            turn = number % len(brokers)
            for one in brokers[turn:] + brokers[:turn]:
                what = "first" if number == 0 else "rebalance"
                figures = one.asked(what)
                print(what, "-", one.name, json.dumps(figures), file=sys.stderr, flush=True)
                if number != 1:  # the first rebalance compiles Kafka's code
                    found[what].setdefault(one.name, []).append(figures)
        for one in brokers:
            print("end", file=one.members.stdin, flush=True)
    keys = ("all_s", "median_s", "client_cpu_s", "broker_cpu_s", "rss_mib")
    medians = {
        what: {
            name: {key: statistics.median(one[key] for one in rounds) for key in keys}
            for name, rounds in by_name.items()
        }
        for what, by_name in found.items()
    }
    counts = {"groups": options.groups, "members": options.members}
    print(json.dumps({"medians": medians, "rounds": found, **counts}))


if __name__ == "__main__":
    main()
