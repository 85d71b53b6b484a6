"""Takeover of a log dir in a bucket by a standby; JSON on stdout.

    python bench/broker_takeover.py [--rounds N] [--records N]

Versity's S3 gateway, an owner and a standby run on this machine, in each round on a new bucket. An
idempotent producer knows both addresses and sends a record every 20 ms. The round ends the owner by
`kill -9` or SIGTERM in turns. All times begin when the signal is sent:

    noticed       the standby takes over
    listening     it printed `listening`
    acknowledged  the first record was acknowledged by it that was produced after the signal
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from confluent_kafka import Producer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from kit.runs.bucket_load import create  # noqa: E402  # after the path is set
from kit.servers.bucket_broker import BucketBroker  # noqa: E402  # the same
from kit.servers.s3 import S3Server  # noqa: E402  # the same

TIMEOUT_S = 120
PERIOD_S = 0.02
WARM_RECORDS = 100
TOPIC = "t"
ENDS = ("killed", "stopped")


class Trickle:
    """A producer of one record every 20 ms, and when each was acknowledged."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.timeout.ms": 1000 * TIMEOUT_S,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.acked_s: dict[int, float] = {}
        self.sent = 0

    def _run(self) -> None:
        while not self._done.is_set():
            number = self.sent
            self._producer.produce(
                TOPIC,
                b"%d" % number,
                partition=0,
                on_delivery=lambda e, _, n=number: self._on(e, n),
            )
            self.sent += 1
            self._producer.poll(PERIOD_S)

    def _on(self, error: object, number: int) -> None:
        if error is not None:
            message = f"record {number} was not acknowledged: {error}"
            raise RuntimeError(message)
        self.acked_s[number] = time.perf_counter()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._producer.flush(TIMEOUT_S)

    def acked_after(self, number: int, since_s: float = 0) -> float:
        """Wait for a record from this number on; returns when the first was acknowledged.

        Args:
            number: The number.
            since_s: Leave out what was acknowledged before this time.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            acked = tuple(self.acked_s.items())
            found = [at_s for n, at_s in acked if n >= number and at_s >= since_s]
            if found:
                return min(found)
            if time.monotonic() > deadline:
                message = "the standby acknowledged nothing"
                raise RuntimeError(message)
            time.sleep(0.005)


def wait_for(broker: BucketBroker, text: bytes) -> float:
    deadline = time.monotonic() + TIMEOUT_S
    while text not in b"\n" + broker.log.read_bytes():
        if time.monotonic() > deadline:
            message = f"no {text!r} in {broker.log}"
            raise RuntimeError(message)
        time.sleep(0.005)
    return time.perf_counter()


def takeover(folder: Path, server: S3Server, records: int, end: str) -> dict[str, float]:
    """One round; returns how long the standby took."""
    bucket = server.new_bucket()
    with ExitStack() as running:
        owner = running.enter_context(BucketBroker(folder / "owner", server, bucket))
        create(owner, TOPIC)
        fill(owner.bootstrap, records)
        standby = BucketBroker(folder / "standby", server, bucket, "--standby")
        running.callback(standby.__exit__)
        standby.start(waits=False)
        wait_for(standby, b"the owner has epoch")
        load = running.enter_context(Trickle(f"{owner.bootstrap},{standby.bootstrap}"))
        load.acked_after(WARM_RECORDS)
        number, began_s = load.sent + 1, time.perf_counter()
        owner.signal(signal.SIGKILL if end == "killed" else signal.SIGTERM)
        noticed_s = wait_for(standby, b"taking over") - began_s
        listening_s = wait_for(standby, b"\nlistening on ")
        acknowledged_s = load.acked_after(number, listening_s) - began_s
        return {
            "noticed_s": noticed_s,
            "listening_s": listening_s - began_s,
            "acknowledged_s": acknowledged_s,
        }


def fill(bootstrap: str, records: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    for number in range(records):
        producer.produce(TOPIC, bytes(1024), partition=number % 4)
        if number % 10_000 == 0:
            producer.flush(TIMEOUT_S)
    if producer.flush(TIMEOUT_S):
        message = "records were not acknowledged"
        raise RuntimeError(message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="half of them by kill -9")
    parser.add_argument("--records", type=int, default=5_000, help="of 1 KiB, before")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {end: [] for end in ENDS}
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        server = running.enter_context(S3Server(Path(name) / "s3"))
        for number in range(options.rounds):
            end = ENDS[number % 2]
            folder = Path(name) / str(number)
            found[end].append(takeover(folder, server, options.records, end))
    summary = {
        end: {
            key: {
                "median": statistics.median(one[key] for one in rounds),
                "lowest": min(one[key] for one in rounds),
                "highest": max(one[key] for one in rounds),
            }
            for key in rounds[0]
        }
        for end, rounds in found.items()
        if rounds
    }
    print(json.dumps({"summary": summary, "rounds": found, "records": options.records}))


if __name__ == "__main__":
    main()
