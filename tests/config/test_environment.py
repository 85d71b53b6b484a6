"""Environment variables of the process: valid values, and the errors for invalid ones.

Method: each variable with values on both sides of each of its limits.
"""

import logging

import pytest

from logmirror.config.environment import (
    HEARTBEAT_SECS,
    IGNORED_VARIABLES,
    METRICS_HOST,
    METRICS_PARTITIONS,
    METRICS_PORT,
    ProcessEnvironment,
    log_ignored_variables,
    read_environment,
)
from logmirror.errors import UsageError


def test_without_variables_the_defaults_apply():
    """KNB-01."""
    defaults = ProcessEnvironment(
        metrics_port=9090,
        metrics_port_is_set=False,
        metrics_host="127.0.0.1",
        metrics_partitions=True,
        heartbeat_ms=30_000,
    )
    assert read_environment({}) == defaults


@pytest.mark.parametrize(("text", "port"), [("0", 0), ("1", 1), ("65535", 65535), ("09090", 9090)])
def test_a_valid_port_is_accepted(text, port):
    assert read_environment({METRICS_PORT: text}).metrics_port == port


@pytest.mark.parametrize(("text", "ms"), [("0", 0), ("1", 1000), ("86400", 86_400_000)])
def test_a_heartbeat_interval_is_given_in_seconds(text, ms):
    assert read_environment({HEARTBEAT_SECS: text}).heartbeat_ms == ms


@pytest.mark.parametrize("text", ["", " ", "-1", "65536", "9090 ", "1e3", "off", "٣", "9" * 5000])
def test_an_invalid_port_is_a_usage_error_that_names_the_variable(text):
    """KNB-02."""
    with pytest.raises(UsageError, match="not a number") as caught:
        read_environment({METRICS_PORT: text})
    assert caught.value.facts == {"variable": METRICS_PORT, "value": text}
    assert METRICS_PORT in caught.value.hint


@pytest.mark.parametrize("text", ["", "0.5", "86401", "30s"])
def test_an_invalid_interval_is_a_usage_error_that_names_the_variable(text):
    with pytest.raises(UsageError, match="not a number") as caught:
        read_environment({HEARTBEAT_SECS: text})
    assert caught.value.facts["variable"] == HEARTBEAT_SECS


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (
            {"MIRROR_V3_METRICS_PORT": "9191"},
            ProcessEnvironment(metrics_port=9191, metrics_port_is_set=True, metrics_host="0.0.0.0"),
        ),
        (
            {"MIRROR_V3_METRICS_PORT": "0", METRICS_HOST: "10.0.0.7"},
            ProcessEnvironment(metrics_port=0, metrics_port_is_set=True, metrics_host="10.0.0.7"),
        ),
        ({"MIRROR_V3_HEARTBEAT_SECS": "5"}, ProcessEnvironment(heartbeat_ms=5000)),
        (
            {"MIRROR_V3_METRICS_PORT": "9191", METRICS_PORT: "9292"},
            ProcessEnvironment(metrics_port=9292, metrics_port_is_set=True),
        ),
        (
            {"MIRROR_V3_HEARTBEAT_SECS": "never", HEARTBEAT_SECS: "0"},
            ProcessEnvironment(heartbeat_ms=0),
        ),
    ],
)
def test_mirror_v3_names_apply_if_the_logmirror_names_are_not_set(environment, found):
    assert read_environment(environment) == found


@pytest.mark.mirror_v3("KNB-02")
@pytest.mark.parametrize("name", ["MIRROR_V3_METRICS_PORT", "MIRROR_V3_HEARTBEAT_SECS"])
def test_an_error_names_the_mirror_v3_variable_that_is_invalid(name):
    with pytest.raises(UsageError, match="not a number") as caught:
        read_environment({name: "9o"})
    assert caught.value.facts == {"variable": name, "value": "9o"}
    assert name in caught.value.hint


def test_ignored_variables_are_logged_in_one_line(caplog):
    caplog.set_level(logging.INFO, logger="logmirror")
    log_ignored_variables({"PATH": "/bin"})
    assert caplog.records == []
    log_ignored_variables(dict.fromkeys(IGNORED_VARIABLES, "x") | {"MIRROR_V3_METRICS_PORT": "1"})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.facts["variables"].split(",") == list(IGNORED_VARIABLES)


@pytest.mark.parametrize(("text", "expected"), [("on", True), ("off", False)])
def test_partition_series_are_on_or_off(text, expected):
    assert read_environment({METRICS_PARTITIONS: text}).metrics_partitions is expected


@pytest.mark.parametrize("text", ["", "0", "OFF", "false", "off "])
def test_an_invalid_switch_is_a_usage_error_that_names_the_variable(text):
    with pytest.raises(UsageError, match="neither on nor off") as caught:
        read_environment({METRICS_PARTITIONS: text})
    assert caught.value.facts == {"variable": METRICS_PARTITIONS, "value": text}


@pytest.mark.parametrize("text", ["0.0.0.0", "10.0.0.7", "::", "::1"])
def test_the_host_is_an_ip_address(text):
    found = read_environment({METRICS_HOST: text})
    assert (found.metrics_host, found.metrics_port_is_set) == (text, False)


@pytest.mark.parametrize("text", ["", "localhost", "0.0.0.0:9090", "*", "[::1]", " ::1", "1.2.3"])
def test_an_invalid_host_is_a_usage_error_that_names_the_variable(text):
    with pytest.raises(UsageError, match="not an IP address") as caught:
        read_environment({METRICS_HOST: text})
    assert caught.value.facts == {"variable": METRICS_HOST, "value": text}
