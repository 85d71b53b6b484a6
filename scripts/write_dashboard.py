#!/usr/bin/env python3
"""Write the Grafana dashboards in `deploy/grafana` from the lists of their panels.

    python scripts/write_dashboard.py

`logmirror.json` is for mirrors, `logmirror-broker.json` for the embedded broker. A test fails if a
file is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

FOLDER: Final = Path(__file__).resolve().parent.parent / "deploy" / "grafana"
FILE: Final = FOLDER / "logmirror.json"
BROKER_FILE: Final = FOLDER / "logmirror-broker.json"
_OF: Final = '{mirror=~"$mirror", destination=~"$destination"}'
_OF_TOPIC: Final = '{topic=~"$topic"}'
_WIDTH: Final = 24
"""Columns of Grafana's grid."""


class Panel(NamedTuple):
    """One panel: its Prometheus queries, and the legend of each."""

    title: str
    queries: tuple[tuple[str, str], ...]
    """Pairs of expression and legend. `OF` is replaced by the selectors of the variables."""

    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    about: str = ""

    @property
    def height(self) -> int:
        """Rows of the grid."""
        return 4 if self.kind == "stat" else 8


def _rate(name: str, by: str = "mirror, destination") -> str:
    return f"sum by ({by}) (rate({name}OF[$__rate_interval]))"


def _rate_of_links(name: str) -> str:
    return f"rate({name}{_LINKS}[$__rate_interval])"


def _p99_of_links(name: str) -> str:
    by_bucket = f"sum by (le, source, destination) ({_rate_of_links(f'{name}_bucket')})"
    return f"histogram_quantile(0.99, {by_bucket})"


_EACH: Final = "{{mirror}} > {{destination}}"
_LINKS: Final = '{destination=~"$destination"}'
_LINK: Final = "{{source}} > {{destination}}"
PANELS: Final = (
    Panel("Ready", (("min(logmirror_ready)", "ready"),), kind="stat", width=4),
    Panel(
        "Flows by state",
        (("sum by (state) (logmirror_mirror_flowsOF)", "{{state}}"),),
        kind="stat",
        width=6,
    ),
    Panel(
        "Oldest record not copied",
        (("max(logmirror_mirror_lag_seconds_maxOF)", "age"),),
        unit="s",
        kind="stat",
        width=5,
    ),
    Panel(
        "Offsets not copied",
        (("sum(logmirror_mirror_lag_offsetsOF)", "offsets"),),
        kind="stat",
        width=4,
    ),
    Panel(
        "Objects claimed first by another writer",
        (("sum(increase(logmirror_mirror_create_conflicts_totalOF[$__range]))", "conflicts"),),
        kind="stat",
        width=5,
        about="Above 0, a second instance is running.",
    ),
    Panel(
        "Lag in time",
        (("logmirror_mirror_lag_seconds_maxOF", _EACH),),
        unit="s",
        about="Age of the oldest record that is not copied, by its timestamp.",
    ),
    Panel("Lag in offsets", (("logmirror_mirror_lag_offsetsOF", _EACH),)),
    Panel(
        "Time without a commit",
        (
            ("logmirror_mirror_stalled_seconds_maxOF", _EACH),
            ("logmirror_destination_max_time_secondsOF", "max-time " + _EACH),
        ),
        unit="s",
        about="An alert fires above twice max-time plus 60 s.",
    ),
    Panel("Records", ((_rate("logmirror_mirror_records_total"), _EACH),), unit="cps"),
    Panel("Bytes written", ((_rate("logmirror_mirror_bytes_total"), _EACH),), unit="Bps"),
    Panel("Commits", ((_rate("logmirror_mirror_commits_total"), _EACH),), unit="ops"),
    Panel(
        "Objects by trigger",
        ((_rate("logmirror_destination_flushes_total", "trigger"), "{{trigger}}"),),
        unit="ops",
        about="Empty if LOGMIRROR_METRICS_PARTITIONS is off.",
    ),
    Panel(
        "Time to write an object",
        tuple(
            (
                f"histogram_quantile({quantile}, "
                + _rate("logmirror_destination_flush_duration_seconds_bucket", "le")
                + ")",
                f"p{int(quantile * 100)}",
            )
            for quantile in (0.5, 0.99)
        ),
        unit="s",
    ),
    Panel(
        "Errors and retries",
        (
            (_rate("logmirror_mirror_errors_total", "mirror, kind"), "{{mirror}}: {{kind}}"),
            (_rate("logmirror_mirror_restarts_total", "mirror"), "{{mirror}}: restarts"),
        ),
        unit="ops",
    ),
    Panel(
        "Offsets without a record",
        ((_rate("logmirror_mirror_gap_offsets_total", "mirror, cause"), "{{mirror}}: {{cause}}"),),
        unit="cps",
        about="Markers, aborted and compacted records. Other gaps stop the mirror.",
    ),
    Panel(
        "Memory",
        (
            ("logmirror_memory_budget_bytes", "budget of all slots"),
            ("logmirror_slot_memory_peak_bytes", "peak of one slot's process"),
            ('process_resident_memory_bytes{job="logmirror"}', "driver"),
        ),
        unit="bytes",
    ),
    Panel(
        "CPU of the driver",
        (('rate(process_cpu_seconds_total{job="logmirror"}[$__rate_interval])', "cores"),),
    ),
    Panel(
        "Partitions furthest behind",
        (
            (
                "topk(20, logmirror_source_lag_secondsOF)",
                _EACH + " {{topic}}-{{partition}}",
            ),
        ),
        unit="s",
        kind="table",
        width=12,
        about="Empty if LOGMIRROR_METRICS_PARTITIONS is off.",
    ),
    Panel(
        "Partitions that back off",
        (("logmirror_flow_inflight_retry_secondsOF > 0", _EACH + " {{topic}}-{{partition}}"),),
        unit="s",
        kind="table",
        width=12,
    ),
    Panel(
        "Groups: last translation",
        ((f"logmirror_groups_checkpoint_seconds{_LINKS}", _LINK),),
        unit="s",
    ),
    Panel(
        "Groups that are not exact, or not read",
        (
            (f"logmirror_groups_inexact{_LINKS}", f"{_LINK} inexact"),
            (f"logmirror_groups_failed{_LINKS}", f"{_LINK} failed"),
        ),
    ),
    Panel(
        "Groups by reason why they are not exact, or not committed",
        ((f"logmirror_groups_by_reason{_LINKS}", f"{_LINK} {{{{reason}}}}"),),
        about="active-at-target: the group has members there. ahead-at-target: it has a higher "
        "offset there.",
    ),
    Panel(
        "From a commit at the source to its checkpoint",
        (
            (_p99_of_links("logmirror_groups_checkpoint_delay_seconds"), f"{_LINK} checkpoint"),
            (_p99_of_links("logmirror_groups_round_duration_seconds"), f"{_LINK} round"),
        ),
        unit="s",
        about="99th percentile.",
    ),
    Panel(
        "Checkpoints, and offsets committed at the target",
        (
            (_rate_of_links("logmirror_groups_checkpoints_total"), f"{_LINK} checkpoints"),
            (_rate_of_links("logmirror_groups_commits_total"), f"{_LINK} offsets"),
        ),
        unit="ops",
    ),
    Panel(
        "Groups: last snapshot beside an archive",
        ((f"logmirror_groups_archived_seconds{_LINKS}", _LINK),),
        unit="s",
    ),
)


def _latency(quantile: float, api: str) -> tuple[str, str]:
    buckets = f'rate(logmirror_broker_request_seconds_bucket{{api="{api}"}}[$__rate_interval])'
    expression = f"histogram_quantile({quantile}, sum by (le) ({buckets}))"
    return expression, f"{api} p{int(quantile * 100)}"


_ALL_REQUESTS: Final = "rate(logmirror_broker_request_seconds_count[$__rate_interval])"
_ALL_ERRORS: Final = "rate(logmirror_broker_request_errors_total[$__rate_interval])"
_NOT_ON_DISK: Final = "logmirror_broker_log_end_offsetOF - logmirror_broker_durable_offsetOF"
_BUCKET_REQUESTS: Final = "rate(logmirror_broker_bucket_requests_total[$__rate_interval])"
_BUCKET_BYTES: Final = "rate(logmirror_broker_bucket_bytes_total[$__rate_interval])"
_SWAPS: Final = "rate(logmirror_broker_move_swap_seconds_bucket[$__rate_interval])"
_MISSES: Final = "rate(logmirror_broker_local_copies_misses_total[$__rate_interval])"
_HITS: Final = "rate(logmirror_broker_local_copies_hits_total[$__rate_interval])"
BROKER_PANELS: Final = (
    Panel("Ready", (("min(logmirror_ready)", "ready"),), kind="stat", width=4),
    Panel("Topics", (("sum(logmirror_broker_topics)", "topics"),), kind="stat", width=4),
    Panel(
        "Offline partitions",
        (("sum(logmirror_broker_offline_partitions)", "partitions"),),
        kind="stat",
        width=5,
        about="Damaged, or after a failure of the disk. The broker's log has the reason.",
    ),
    Panel(
        "Connections", (("sum(logmirror_broker_connections)", "connections"),), kind="stat", width=5
    ),
    Panel(
        "Size of the logs",
        (("sum(logmirror_broker_log_bytesOF)", "bytes"),),
        unit="bytes",
        kind="stat",
        width=6,
    ),
    Panel("Records in", ((_rate("logmirror_broker_records_in_total", "topic"), "{{topic}}"),)),
    Panel(
        "Bytes in",
        ((_rate("logmirror_broker_bytes_in_total", "topic"), "{{topic}}"),),
        unit="Bps",
    ),
    Panel(
        "Bytes out",
        ((_rate("logmirror_broker_bytes_out_total", "topic"), "{{topic}}"),),
        unit="Bps",
    ),
    Panel("Requests", ((f"sum by (api) ({_ALL_REQUESTS})", "{{api}}"),), unit="ops"),
    Panel(
        "Latency of requests",
        (_latency(0.5, "Produce"), _latency(0.99, "Produce"), _latency(0.99, "Metadata")),
        unit="s",
        about="Produce includes the flush to disk.",
    ),
    Panel(
        "Errors in responses",
        ((f"sum by (api, error) ({_ALL_ERRORS})", "{{api}}: {{error}}"),),
        unit="ops",
    ),
    Panel(
        "Batches that were not acknowledged",
        (
            (
                _rate("logmirror_broker_produce_errors_total", "topic, error"),
                "{{topic}}: {{error}}",
            ),
        ),
        unit="ops",
    ),
    Panel(
        "Written and not on disk yet",
        ((f"sum by (topic) ({_NOT_ON_DISK})", "{{topic}}"),),
        about="A power loss would take these offsets away. Their producers wait for the disk, "
        "unless the topic is flushed in the background.",
    ),
    Panel(
        "Largest partitions",
        (("topk(20, logmirror_broker_log_bytesOF)", "{{topic}}-{{partition}}"),),
        unit="bytes",
        kind="table",
    ),
    Panel(
        "Requests to buckets",
        ((f"sum by (of, kind) ({_BUCKET_REQUESTS})", "{{of}}: {{kind}}"),),
        unit="ops",
        about="What a store is paid for: puts and lists cost most. Empty without a bucket.",
    ),
    Panel(
        "Bytes to and from buckets",
        ((f"sum by (of, kind) ({_BUCKET_BYTES})", "{{of}}: {{kind}}"),),
        unit="Bps",
    ),
    Panel(
        "Commit objects that a start would read",
        (
            ("logmirror_broker_commits_held", "all"),
            ("logmirror_broker_commits_since_snapshot", "since the snapshot of {{database}}"),
        ),
    ),
    Panel(
        "Oldest record that is not in the bucket",
        (("logmirror_broker_oldest_unflushed_seconds", "age"),),
        unit="s",
    ),
    Panel(
        "Local copies of objects",
        (
            ("logmirror_broker_local_copies_bytes", "{{of}}, bytes"),
            (f"sum by (of) ({_MISSES})", "{{of}}, fetched per second"),
        ),
    ),
    Panel(
        "Hit ratio of local copies",
        ((f"sum by (of) ({_HITS}) / sum by (of) ({_HITS} + {_MISSES})", "{{of}}"),),
        unit="percentunit",
        about="Of the reads of segments, those whose local copy was here.",
    ),
    Panel(
        "Moves between log directories",
        (
            ("sum(logmirror_broker_moves_in_progress)", "in progress"),
            ("sum(logmirror_broker_moves_failed)", "failed"),
            ("sum(increase(logmirror_broker_move_swaps_total[$__rate_interval]))", "completed"),
        ),
        about="The broker's log has the reason of a failed move.",
    ),
    Panel(
        "Bytes of moves",
        (
            ("sum(logmirror_broker_move_bytes_left)", "left"),
            (
                "sum(rate(logmirror_broker_move_bytes_copied_total[$__rate_interval]))",
                "copied per second",
            ),
        ),
        unit="bytes",
    ),
    Panel(
        "Duration of swaps",
        ((f"histogram_quantile(0.99, sum by (le) ({_SWAPS}))", "p99"),),
        unit="s",
        about="When a copy becomes the partition, no request is handled for this time.",
    ),
    Panel(
        "Memory and CPU",
        (
            ('process_resident_memory_bytes{job="logmirror-broker"}', "memory, bytes"),
            (
                'rate(process_cpu_seconds_total{job="logmirror-broker"}[$__rate_interval])',
                "CPU, cores",
            ),
        ),
    ),
)

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard of the mirrors as Grafana imports it."""
    destinations = 'label_values(logmirror_mirror_flows{mirror=~"$mirror"}, destination)'
    variables = [
        _variable("mirror", "label_values(logmirror_mirror_flows, mirror)"),
        _variable("destination", destinations),
    ]
    return _dashboard("logmirror", PANELS, _OF, variables)


def broker_dashboard() -> dict[str, Any]:
    """Return the dashboard of the embedded broker."""
    variables = [_variable("topic", "label_values(logmirror_broker_log_end_offset, topic)")]
    return _dashboard("logmirror-broker", BROKER_PANELS, _OF_TOPIC, variables)


def _dashboard(
    name: str, listed: tuple[Panel, ...], of: str, variables: list[dict[str, Any]]
) -> dict[str, Any]:
    panels, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(listed, 1):
        if x + panel.width > _WIDTH:
            x, y = 0, y + row_height
        panels.append(_panel(panel, number, {"x": x, "y": y}, of))
        x, row_height = x + panel.width, panel.height
    return {
        "title": name,
        "uid": name,
        "tags": ["kafka", "logmirror"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                *variables,
            ]
        },
        "panels": panels,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, number: int, place: dict[str, int], of: str) -> dict[str, Any]:
    is_table = panel.kind == "table"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {**place, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": expression.replace("OF", of),
                "legendFormat": legend,
                "instant": is_table,
                "format": "table" if is_table else "time_series",
            }
            for at, (expression, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """Return the text of the file of mirrors."""
    return json.dumps(dashboard(), indent=1) + "\n"


def broker_text() -> str:
    """Return the text of the file of the embedded broker."""
    return json.dumps(broker_dashboard(), indent=1) + "\n"


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
    BROKER_FILE.write_text(broker_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
