"""What the broker's monitoring port shows: `/metrics`, `/livez`, `/readyz`, `/status.json`.

Values are read from the topics and counters when a scrape arrives, in the port's own thread.
Nothing is recorded for it while requests are handled, except the counters in `traffic`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.bucket_monitoring import BucketValues
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.moves_monitoring import move_numbers, move_status, swap_seconds
from logmirror.monitoring import broker_metrics as catalogue
from logmirror.monitoring.http import serve
from logmirror.monitoring.metrics import Distribution
from logmirror.wire.serve_messages import error_counts

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from logmirror.broker.broker import Broker
    from logmirror.broker.bucket.standby import Standby
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.options import BrokerOptions
    from logmirror.broker.protocol.connections import Connections
    from logmirror.broker.topic import Topic
    from logmirror.monitoring.exposition import Values, Views
    from logmirror.monitoring.metrics import Labels, Metric

    Numbers = list[tuple[Labels, float]]

STALLED_MS: Final = 10_000
"""After this time without a turn of the event loop the broker is not live. It has one each second,
in which limits are enforced."""


def endpoint(broker: Broker, connections: Connections) -> AbstractContextManager[int | None]:
    """Serve the monitoring port of the options until the block ends; none if it is 0.

    Raises:
        UnavailableError: Another process uses the port.
        UsageError: The address does not belong to this machine, or the port is not permitted.
    """
    values, views = BrokerValues(broker, connections), BrokerViews(broker, connections)
    return endpoint_of(broker.options, values, views)


def endpoint_of(
    options: BrokerOptions, values: Values, views: Views
) -> AbstractContextManager[int | None]:
    """As `endpoint`, with other values."""
    return serve(
        options.monitoring_port,
        values,
        views,
        host=options.monitoring_host,
        catalogue=catalogue.BROKER_CATALOGUE,
        hint="give another port with --monitoring-port, or 0 for none; --monitoring-host is an "
        "address of this machine",
    )


class BrokerValues:
    """The values of the metrics, as `Exposition` reads them. Safe from any thread."""

    def __init__(self, broker: Broker, connections: Connections) -> None:
        self._broker, self._connections = broker, connections
        self._numbers: dict[Metric, Callable[[], Numbers]] = {
            catalogue.BYTES_IN: lambda: self._by_topic(lambda log: log.appended_bytes),
            catalogue.BYTES_OUT: lambda: self._by_topic(lambda log: log.fetched_bytes),
            catalogue.RECORDS_IN: lambda: self._by_topic(lambda log: log.appended_records),
            catalogue.PRODUCE_ERRORS: self._produce_errors,
            catalogue.REQUEST_ERRORS: self._request_errors,
            catalogue.THROTTLED: lambda: [
                ((str(quota),), count) for quota, count in tuple(broker.traffic.throttled.items())
            ],
            catalogue.LOG_START: lambda: self._by_partition(lambda log: log.log_start),
            catalogue.LOG_END: lambda: self._by_partition(lambda log: log.log_end),
            catalogue.HIGH_WATERMARK: lambda: self._by_partition(lambda log: log.high_watermark),
            catalogue.DURABLE: lambda: self._by_partition(lambda log: log.durable),
            catalogue.LOG_BYTES: lambda: self._by_partition(lambda log: log.size_bytes),
            catalogue.TOPICS: lambda: [((), len(broker.topics.by_name))],
            catalogue.OFFLINE: lambda: [((), len(_offline(broker)))],
            catalogue.OFFLINE_DIRS: lambda: [((), len(broker.topics.dirs.offline))],
            catalogue.CONNECTIONS: lambda: [((), len(connections.open))],
        }
        self._bucket = BucketValues(broker.commits, broker.options.archives, broker.copies)

    def numbers(self, metric: Metric, now_s: float = 0) -> Numbers:  # noqa: ARG002  # no ages
        """Return the values of a gauge or counter, by labels."""
        if metric in catalogue.MOVE_CATALOGUE:
            return move_numbers(self._broker.topics.moves, metric)
        found = self._numbers.get(metric)
        return self._bucket.numbers(metric) if found is None else found()

    def distributions(self, metric: Metric) -> list[tuple[Labels, Distribution]]:
        """Return the latency of requests, by API, or that of swaps."""
        if metric is catalogue.SWAP_SECONDS:
            return swap_seconds(self._broker.topics.moves)
        return [
            ((_api_name(api_key),), Distribution(tuple(latency.counts), latency.total_s))
            for api_key, latency in tuple(self._broker.traffic.latencies.items())
        ]

    def _by_topic(self, value: Callable[[PartitionLog], int]) -> Numbers:
        return [((topic.name,), sum(map(value, topic.logs))) for topic in _topics(self._broker)]

    def _by_partition(self, value: Callable[[PartitionLog], int]) -> Numbers:
        return [
            ((topic.name, str(number)), value(log))
            for topic in _topics(self._broker)
            for number, log in enumerate(topic.logs)
        ]

    def _produce_errors(self) -> Numbers:
        errors = self._broker.traffic.produce_errors
        return [((topic, _error_name(code)), n) for (topic, code), n in tuple(errors.items())]

    def _request_errors(self) -> Numbers:
        found: Counter[tuple[int, int]] = error_counts()
        for (_, code), count in tuple(self._broker.traffic.produce_errors.items()):
            found[Api.PRODUCE, code] += count
        for key, count in tuple(self._broker.traffic.errors.items()):
            found[key] += count
        return [((_api_name(key), _error_name(code)), n) for (key, code), n in found.items()]


class NoValues:
    """The metrics of a standby, which serves no client: none but those of its process."""

    def numbers(self, metric: Metric, now_s: float = 0) -> Numbers:  # noqa: ARG002  # no metric has one
        """Return nothing."""
        return []

    def distributions(self, metric: Metric) -> list[tuple[Labels, Distribution]]:  # noqa: ARG002  # the same
        """Return nothing."""
        return []


class StandbyViews:
    """Probes and status of a standby. Safe from any thread."""

    def __init__(self, bucket: str, standby: Standby) -> None:
        self._bucket, self._standby = bucket, standby

    def not_live(self) -> list[str]:
        """Return nothing: a standby that waits is as it should be."""
        return []

    def not_ready(self) -> list[str]:
        """Return why clients are not served."""
        return ["not ready: standby, waits until the owner of the log dir is gone"]

    def status(self) -> dict[str, object]:
        """Return the content of `/status.json`."""
        heartbeat = self._standby.watch.heartbeat
        return {
            "standby": True,
            "log_dirs": [self._bucket],
            "owner_epoch": None if heartbeat is None else heartbeat.epoch,
            "owner_quiet_ms": self._standby.watch.quiet_ms,
        }


class BrokerViews:
    """Probes and status. Safe from any thread."""

    def __init__(self, broker: Broker, connections: Connections) -> None:
        self._broker, self._connections = broker, connections

    def not_live(self) -> list[str]:
        """Return why the process should be restarted: its event loop does not turn."""
        age_ms = self._broker.clock.monotonic_ms() - self._connections.swept_ms
        if age_ms <= STALLED_MS:
            return []
        return [f"not live: the event loop has not responded for {age_ms // 1000} s"]

    def not_ready(self) -> list[str]:
        """Return why clients are not served. Offline partitions do not affect the others."""
        if self._connections.is_stopping:
            return ["not ready: the broker is stopping"]
        failure = self._broker.state.failure
        if failure is None:
            return []
        return [f"not ready: groups and transactions are not written until a restart: {failure}"]

    def status(self) -> dict[str, object]:
        """Return the content of `/status.json`."""
        broker = self._broker
        return {
            "cluster_id": broker.store.cluster_id,
            "node_id": broker.options.node_id,
            "port": broker.port,
            "log_dirs": list(broker.topics.dirs.by_name),
            "offline_log_dirs": _offline_dirs(broker),
            "connections": len(self._connections.open),
            "topics": [_topic_status(topic) for topic in _topics(broker)],
            "moves": move_status(broker.topics.moves),
            "offline": _offline(broker),
        }


def _topics(broker: Broker) -> list[Topic]:
    return sorted(broker.topics.by_name.values(), key=lambda topic: topic.name)


def _offline(broker: Broker) -> dict[str, str]:
    """Return the failure of each partition that is offline."""
    return {
        f"{topic.name}-{number}": str(log.failure)
        for topic in _topics(broker)
        for number, log in enumerate(topic.logs)
        if log.failure is not None
    }


def _offline_dirs(broker: Broker) -> dict[str, str]:
    """Return the failure of each log directory that is offline."""
    dirs = broker.topics.dirs
    return {dirs.name_of(path): str(failure) for path, failure in tuple(dirs.offline.items())}


def _topic_status(topic: Topic) -> dict[str, object]:
    logs = topic.logs
    return {
        "name": topic.name,
        "partitions": len(logs),
        "offsets": sum(log.high_watermark - log.log_start for log in logs),
        "bytes": sum(log.size_bytes for log in logs),
    }


def _api_name(api_key: int) -> str:
    """`PRODUCE`, `LIST_OFFSETS`, ... as `Produce`, `ListOffsets`."""
    return "".join(word.capitalize() for word in Api(api_key).name.split("_"))


def _error_name(code: int) -> str:
    return ErrorCode(code).name if code in ErrorCode._value2member_map_ else str(code)
