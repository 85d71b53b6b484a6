"""Takeover of a log dir in a bucket by a standby; JSON on stdout.

    python bench/broker_takeover.py [--rounds N] [--records N]

Versity's S3 gateway, an owner and a standby run on this machine. An idempotent producer knows both
addresses and sends a record every 20 ms. Each round ends the owner, by `kill -9` or by SIGTERM in
turns, and starts another standby afterwards. All times begin when the signal is sent:

    listening     the standby printed `listening`
    acknowledged  the first record was acknowledged that was produced after the signal
"""

from __future__ import annotations

import argparse
import json
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

    def acked_after(self, number: int) -> float:
        """Wait for a record from this number on; returns when the first was acknowledged."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            found = [at_s for n, at_s in tuple(self.acked_s.items()) if n >= number]
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


def waiting(standby: BucketBroker) -> BucketBroker:
    standby.log.unlink(missing_ok=True)
    standby.start(waits=False)
    wait_for(standby, b"the owner has epoch")
    return standby


def takeover(
    owner: BucketBroker, standby: BucketBroker, load: Trickle, end: str
) -> dict[str, float]:
    """End the owner; returns how long the standby took."""
    number, began_s = load.sent + 1, time.perf_counter()
    if end == "killed":
        owner.kill()
    else:
        stop = threading.Thread(target=owner.stop)
        stop.start()
    listening_s = wait_for(standby, b"\nlistening on ") - began_s
    acknowledged_s = load.acked_after(number) - began_s
    if end == "stopped":
        stop.join()
    return {"listening_s": listening_s, "acknowledged_s": acknowledged_s}


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
    parser.add_argument("--records", type=int, default=20_000, help="of 1 KiB, before")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {end: [] for end in ENDS}
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        server = running.enter_context(S3Server(Path(name) / "s3"))
        bucket = server.new_bucket()
        machines = [
            BucketBroker(Path(name) / f"machine-{n}", server, bucket, "--standby") for n in range(2)
        ]
        for machine in machines:
            running.callback(machine.__exit__)
        owner, standby = machines[0].start(), machines[1]
        create(owner, TOPIC)
        fill(owner.bootstrap, options.records)
        waiting(standby)
        load = running.enter_context(Trickle(f"{owner.bootstrap},{standby.bootstrap}"))
        for number in range(options.rounds):
            end = ENDS[number % 2]
            load.acked_after(load.sent)
            found[end].append(takeover(owner, standby, load, end))
            owner, standby = standby, waiting(owner)
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
