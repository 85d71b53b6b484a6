#!/usr/bin/env python3
"""Write the Grafana dashboard, `deploy/grafana/logmirror.json`, from the list of its panels.

    python scripts/write_dashboard.py

A test fails if the file is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

FILE: Final = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "logmirror.json"
_OF: Final = '{mirror=~"$mirror", destination=~"$destination"}'
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


_EACH: Final = "{{mirror}} > {{destination}}"
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
)

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > _WIDTH:
            x, y = 0, y + row_height
        panels.append(_panel(panel, number, {"x": x, "y": y}))
        x, row_height = x + panel.width, panel.height
    return {
        "title": "logmirror",
        "uid": "logmirror",
        "tags": ["kafka", "logmirror"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable("mirror", "label_values(logmirror_mirror_flows, mirror)"),
                _variable(
                    "destination",
                    'label_values(logmirror_mirror_flows{mirror=~"$mirror"}, destination)',
                ),
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


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
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
                "expr": expression.replace("OF", _OF),
                "legendFormat": legend,
                "instant": is_table,
                "format": "table" if is_table else "time_series",
            }
            for at, (expression, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """Return the text of the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> None:
    """Write the file."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
