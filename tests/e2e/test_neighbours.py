"""A destination or source that halts, drips or refuses does not hold up any other flow.

Method: one process with all kinds of destinations and two sources, on Spark. One of them is
disturbed; then records are produced, and all other destinations must have them before the
disturbance ends. Nothing is measured here: see the table of neighbours in docs/bench.md.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import Message, produce
from kit.judges.copies import end_of
from kit.judges.truth import Source, object_names
from kit.runs.commands import Run, mirror, wait_until, write_config
from kit.runs.inline_run import run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.machine import free_ports
from kit.servers.s3 import S3Server
from kit.servers.toxiproxy import Toxiproxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.xdist_group("e2e-neighbours"), pytest.mark.timeout(600)]

PARTITIONS = 2
QUICK = {"max_time_ms": 300}


class Plant:
    """Two sources, two clusters, a bucket behind a proxy and a directory, and what they hold."""

    def __init__(self, tmp_path, s3, toxiproxy, stack) -> None:
        names = ("source", "other-source", "cluster", "other-cluster")
        self.brokers = {
            name: stack.enter_context(EmbeddedBroker(tmp_path / name)) for name in names
        }
        for name in ("source", "other-source"):
            create_topic(self.brokers[name].bootstrap, name, PARTITIONS, {})
        self.bucket, self.s3, self.root = s3.new_bucket(), s3, tmp_path
        port = free_ports(1)[0]
        upstream = s3.endpoint.removeprefix("http://")
        self.link = toxiproxy.link("s3", listen=port, upstream=upstream)
        self.produced = dict.fromkeys(("source", "other-source"), 0)
        to_bucket = s3.destination(self.bucket, name="bucket")
        to_bucket["endpoint"] = f"http://{self.link.address}"
        self.config = write_config(
            tmp_path / "config.json",
            self._to_cluster("source", "cluster"),
            self._to_cluster("source", "other-cluster"),
            self._to_cluster("other-source", "cluster"),
            self._archive("files", {"type": "filesystem", "root": str(tmp_path)}),
            self._archive("bucket", to_bucket),
        )

    def _to_cluster(self, source, cluster):
        return {
            "name": f"{source} to {cluster}",
            "source": {"bootstrap-servers": self.brokers[source].bootstrap},
            "topic": source,
            "partitions": "all",
            "destinations": [
                {
                    "name": source,
                    "type": "kafka",
                    "bootstrap-servers": self.brokers[cluster].bootstrap,
                    "replication-factor": 1,
                }
            ],
        }

    def _archive(self, name, destination):
        bootstrap = self.brokers["source"].bootstrap
        return mirror(
            "source", bootstrap, "", name=name, form="native", **QUICK, destinations=[destination]
        )

    def produce(self, source, count=20):
        """Produce to both partitions, and return nothing before the source has the records."""
        for partition in range(PARTITIONS):
            messages = [Message(value=b"%d" % n) for n in range(count)]
            produce(self.brokers[source].bootstrap, source, messages, partition=partition)
        self.produced[source] += count

    def ends(self, flow):
        """One past the last offset of each partition that a destination holds."""
        source, _, to = flow.partition(" to ")
        if to in self.brokers:
            where = self.brokers[to].bootstrap
            return [end_of(where, source, number) for number in range(PARTITIONS)]
        folder = self.root / "files" if to == "files" else self.s3.files(self.bucket) / "bucket"
        found = [object_names(folder / str(number)) for number in range(PARTITIONS)]
        return [int(names[-1].split(".")[0].split("-")[1]) + 1 if names else 0 for names in found]

    def wait_for(self, *flows, timeout_s=60):
        """Wait until destinations hold all that was produced."""
        for flow in flows:
            expected = [self.produced[flow.partition(" to ")[0]]] * PARTITIONS
            wait_until(
                lambda flow=flow, expected=expected: self.ends(flow) == expected,
                what=lambda flow=flow, expected=expected: f"{expected} in {flow}",
                timeout_s=timeout_s,
            )


FLOWS = (
    "source to cluster",
    "source to other-cluster",
    "other-source to cluster",
    "source to files",
    "source to bucket",
)


@contextlib.contextmanager
def halted(broker) -> Iterator[None]:
    broker.pause()
    try:
        yield
    finally:
        broker.resume()


def disturbances(plant: Plant) -> dict[str, tuple[Callable, tuple[str, ...]]]:
    """What is disturbed, how, and the flows that it may hold up."""
    brokers, link = plant.brokers, plant.link
    to_cluster = ("source to cluster", "other-source to cluster")
    to_bucket = ("source to bucket",)
    return {
        "a halted cluster": (lambda: halted(brokers["cluster"]), to_cluster),
        "a halted source": (lambda: halted(brokers["other-source"]), to_cluster[1:]),
        "a bucket that drips": (
            lambda: link.spoiled("slicer", stream="downstream", average_size=1, delay=1_000_000),
            to_bucket,
        ),
        "a bucket that never responds": (lambda: link.spoiled("timeout", timeout=0), to_bucket),
        "a bucket that refuses": (link.down, to_bucket),
    }


def test_what_halts_drips_or_refuses_holds_up_no_other_flow(tmp_path):
    with contextlib.ExitStack() as stack:
        s3 = stack.enter_context(S3Server(tmp_path / "s3"))
        toxiproxy = stack.enter_context(Toxiproxy(tmp_path))
        plant = Plant(tmp_path, s3, toxiproxy, stack)
        run = stack.enter_context(Run(plant.config, folder=tmp_path))
        for source in plant.produced:
            plant.produce(source)
        plant.wait_for(*FLOWS, timeout_s=180)  # Spark and five processes start beside other tests

        for disturb, held_up in disturbances(plant).values():
            with disturb():
                for _ in range(3):
                    for source in plant.produced:
                        if not (source == "other-source" and held_up == FLOWS[2:3]):
                            plant.produce(source)
                    plant.wait_for(*(flow for flow in FLOWS if flow not in held_up))
            plant.wait_for(*FLOWS)

        with halted(plant.brokers["cluster"]):
            plant.produce("source")
            run.wait_for("waiting: no response yet .*source to cluster")
            run.signal(signal.SIGTERM)
            assert run.wait(timeout_s=30) == 0, run.text
            run.wait_until_nothing_is_left()
            plant.wait_for("source to other-cluster", "source to files", "source to bucket")
        result = run_now(plant.config)

        assert result.returncode == 0, result.stderr
        plant.wait_for(*FLOWS)
        truth = Source(plant.brokers["source"].bootstrap, "source", partitions=range(PARTITIONS))
        assert truth.anomalies(tmp_path, "native", name="files") == []
        assert truth.anomalies(s3.files(plant.bucket), "native", name="bucket") == []
        for cluster in ("cluster", "other-cluster"):
            copy = Source(plant.brokers[cluster].bootstrap, "source", partitions=range(PARTITIONS))
            for partition in range(PARTITIONS):
                assert copy.rows(partition) == truth.rows(partition)
