"""Alert rules and dashboard: they name existing metrics, and a real Prometheus accepts them.

Method: promtool checks the rules and runs their unit tests. One Prometheus scrapes one real run and
evaluates every expression of the dashboard and of the rules. Its own formatter parses them, before
names are extracted and looked up in the catalogue.
"""

import importlib.util
import json
import re
import signal
from pathlib import Path

import pytest
import yaml

from kit.judges.clients import produce
from kit.judges.gaps import plain_messages
from kit.judges.scrape import ask
from kit.runs.commands import mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster
from kit.servers.machine import free_ports
from kit.servers.prometheus import Prometheus, names, promtool
from logmirror.config.environment import METRICS_PORT
from logmirror.monitoring.derived_metrics import AGGREGATES, MIRROR_V3_CATALOGUE
from logmirror.monitoring.metrics import CATALOGUE

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
UNIT_TESTS = ROOT / "deploy" / "prometheus" / "alerts.test.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "logmirror.json"

EMPTY = {
    "Errors and retries": {0},  # restarts are there, as 0
    "Offsets without a record": {0},
    "Partitions that back off": {0},
}
"""By panel, its queries that a healthy copy of plain records gives nothing for."""

FROM_ELSEWHERE = {"up", "process_start_time_seconds", "process_resident_memory_bytes"} | {
    "process_cpu_seconds_total"
}
"""Prometheus's own, and its library's for any process."""


def rules():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def dashboard_queries():
    """(panel, number of the query, expression as Grafana would send it)"""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for number, target in enumerate(panel["targets"]):
            expression = target["expr"]
            for variable in ("$mirror", "$destination"):
                expression = expression.replace(variable, ".*")
            for variable in ("$__rate_interval", "$__range"):
                expression = expression.replace(variable, "1m")
            assert "$" not in expression
            yield panel["title"], number, expression


def known_names():
    """Metric to its labels, as a scrape has them."""
    known = {}
    for metric in (*CATALOGUE, *AGGREGATES, *MIRROR_V3_CATALOGUE):
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        for suffix in suffixes:
            known[metric.name + suffix] = {*metric.labels, *(["le"] if suffix else [])}
    return known | {name: set() for name in FROM_ELSEWHERE}


# -- by themselves ---------------------------------------------------------------------------------


def test_the_dashboard_is_what_its_list_of_panels_says():
    spec = importlib.util.spec_from_file_location("w", ROOT / "scripts" / "write_dashboard.py")
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert writer.text() == DASHBOARD.read_text(encoding="utf-8"), "run `make schema`"


def test_panels_do_not_overlap_and_each_has_a_query():
    places = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        assert panel["targets"], panel["title"]
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not covered & places, panel["title"]
        places |= covered
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_promtool_accepts_the_rules():
    result = promtool("check", "rules", RULES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(rules())} rules found" in result.stdout


def test_each_alert_fires_and_stays_silent_as_specified():
    result = promtool("test", "rules", UNIT_TESTS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_unit_tests_have_both_cases_of_each_alert():
    cases = [
        case
        for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    every = {rule["alert"] for rule in rules()}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == every
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == every


def test_series_of_the_unit_tests_are_those_of_the_catalogue():
    known = known_names()
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        for line in test["input_series"]:
            name, _, inside = line["series"].rstrip("}").partition("{")
            labels = set(re.findall(r"(\w+)=", inside))
            assert labels - {"job", "instance"} == known[name], name


def test_texts_of_alerts_use_labels_that_their_series_have():
    for rule in rules():
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert used <= {"instance", "mirror", "destination", "source"}
        assert len(used & {"instance", "mirror", "source"}) == 1, rule["alert"]
        assert {"summary", "description"} == set(rule["annotations"])


# -- at a real Prometheus --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scraped(cli_broker, tmp_path_factory):
    """A Prometheus that has scraped a real run, and the port of that run."""
    folder = tmp_path_factory.mktemp("monitoring")
    topic = cli_broker.create_topic("monitoring", 2)
    limits = {"max_time_ms": 200, "max_offsets": 20}
    one = mirror(topic, cli_broker.bootstrap, folder, name="orders", **limits)
    one["groups"] = {"source-alias": "primary", "archive-interval-ms": 500}
    two = cli_broker.create_topic("of-groups", 1)
    servers = (cli_broker.bootstrap, cli_broker.bootstrap)
    standby = mirror_to_cluster(
        two, *servers, name="standby", topic=f"{two}-2", offsets="translate"
    )
    standby["groups"] = {"source-alias": "primary", "interval-ms": 500, "sync-group-offsets": True}
    config = write_config(folder / "config.json", one, standby, metrics_prefix="mirror_v3")
    port = free_ports(1)[0]
    arguments = ("--log-format", "json")
    with InlineRun(config, *arguments, folder=folder, environment={METRICS_PORT: str(port)}) as run:
        run.wait_for("mirror starts")
        with Prometheus(folder / "prometheus", port, RULES) as prometheus:
            wait_until(
                lambda: prometheus.query('up{job="logmirror"} == 1'),
                what=lambda: f"a first scrape: {run.text}",
            )
            produce(cli_broker.bootstrap, topic, plain_messages(100, seed=1))
            wait_until(
                lambda: prometheus.query("logmirror_mirror_records_total == 100"),
                what=lambda: f"a scrape of 100 records: {run.text}",
            )
            wait_until(
                lambda: (
                    prometheus.query("logmirror_groups_checkpoint_seconds")
                    and prometheus.query("logmirror_groups_archived_seconds")
                ),
                what=lambda: f"a scrape of groups: {run.text}",
            )
            again = "rate(logmirror_destination_flushes_total[1m])"
            wait_until(lambda: prometheus.query(again), what=lambda: "one more scrape")
            yield prometheus, port
            run.signal(signal.SIGTERM)
            assert run.wait() == 0


def test_each_dashboard_expression_returns_data(scraped):
    prometheus, _ = scraped
    for title, number, expression in dashboard_queries():
        found = prometheus.query(expression)
        is_empty = number in EMPTY.get(title, ())
        assert bool(found) != is_empty, (title, expression, found)


def test_a_healthy_run_fires_no_alert(scraped):
    prometheus, _ = scraped
    (group,) = prometheus.api("rules")["groups"]

    def evaluated():
        return prometheus.api("rules")["groups"][0]["rules"]

    wait_until(
        lambda: all(rule["health"] == "ok" for rule in evaluated()), what=lambda: f"{evaluated()}"
    )
    assert len(group["rules"]) == len(rules())
    assert {rule["state"] for rule in evaluated()} == {"inactive"}
    assert prometheus.query("logmirror_ready == 1")


def test_every_named_metric_and_label_exists(scraped):
    prometheus, _ = scraped
    known = known_names()
    expressions = [expression for _, _, expression in dashboard_queries()]
    expressions += [rule["expr"] for rule in rules()]
    used = set()
    for expression in expressions:
        metrics, labels = names(prometheus.formatted(expression))
        assert metrics, expression
        assert metrics <= known.keys(), expression
        allowed = set().union(*(known[name] for name in metrics)) | {"job", "instance"}
        assert labels <= allowed, expression
        used |= metrics
    assert len(used) > 20


def test_metric_names_are_found_in_every_expression(scraped):
    prometheus, _ = scraped
    expression = (
        'sum by (a, b) (rate(one_total{c="x", d=~"y{"}[5m])) / on (e) group_left (f) '
        "max without (g) (two_bytes offset 1h) and histogram_quantile(0.9, three_bucket) > bool 1"
    )
    metrics, labels = names(prometheus.formatted(expression))
    assert metrics == {"one_total", "two_bytes", "three_bucket"}
    assert labels == set("abcdefg")


def test_what_is_scraped_is_the_catalogue_and_both_families_are_there(scraped):
    prometheus, port = scraped
    lines = ask(port, "/metrics").text.splitlines()
    families = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    wanted = {metric.name for metric in (*CATALOGUE, *AGGREGATES, *MIRROR_V3_CATALOGUE)}
    assert wanted <= families
    assert families - wanted <= {name for name in families if name.startswith("process_")}
    assert prometheus.query("mirror_v3_destination_offset_verified")
    (series,) = prometheus.query("sum by (mirror) (mirror_v3_destination_records_total > 0)")
    assert (series["metric"]["mirror"], series["value"][1]) == ("orders", "100")
