"""Switches of the environment: what they take, and what is told of a value that they do not take.

Method: each variable with values from both sides of each of its limits.
"""

import pytest

from logmirror.errors import UsageError
from logmirror.knobs import (
    HEARTBEAT_SECS,
    METRICS_PARTITIONS,
    METRICS_PORT,
    Knobs,
    read_knobs,
)


def test_without_variables_the_defaults_hold():
    """KNB-01."""
    defaults = Knobs(metrics_port=9090, metrics_partitions=True, heartbeat_ms=30_000)
    assert read_knobs({}) == defaults


@pytest.mark.parametrize(("text", "port"), [("0", 0), ("1", 1), ("65535", 65535), ("09090", 9090)])
def test_a_port_is_taken(text, port):
    assert read_knobs({METRICS_PORT: text}).metrics_port == port


@pytest.mark.parametrize(("text", "ms"), [("0", 0), ("1", 1000), ("86400", 86_400_000)])
def test_a_heartbeat_is_taken_in_seconds(text, ms):
    assert read_knobs({HEARTBEAT_SECS: text}).heartbeat_ms == ms


@pytest.mark.parametrize("text", ["", " ", "-1", "65536", "9090 ", "1e3", "off", "٣", "9" * 5000])
def test_what_is_no_port_is_a_usage_error_that_names_the_variable(text):
    """KNB-02."""
    with pytest.raises(UsageError, match="not a number") as caught:
        read_knobs({METRICS_PORT: text})
    assert caught.value.facts == {"variable": METRICS_PORT, "value": text}
    assert METRICS_PORT in caught.value.hint


@pytest.mark.parametrize("text", ["", "0.5", "86401", "30s"])
def test_what_is_no_interval_is_a_usage_error_that_names_the_variable(text):
    with pytest.raises(UsageError, match="not a number") as caught:
        read_knobs({HEARTBEAT_SECS: text})
    assert caught.value.facts["variable"] == HEARTBEAT_SECS


@pytest.mark.parametrize(("text", "expected"), [("on", True), ("off", False)])
def test_series_of_partitions_are_on_or_off(text, expected):
    assert read_knobs({METRICS_PARTITIONS: text}).metrics_partitions is expected


@pytest.mark.parametrize("text", ["", "0", "OFF", "false", "off "])
def test_what_is_neither_on_nor_off_is_a_usage_error_that_names_the_variable(text):
    with pytest.raises(UsageError, match="neither on nor off") as caught:
        read_knobs({METRICS_PARTITIONS: text})
    assert caught.value.facts == {"variable": METRICS_PARTITIONS, "value": text}
