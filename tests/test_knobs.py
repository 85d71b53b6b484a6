"""Switches of the environment: what they take, and what is told of a value that they do not take.

Method: each variable with values from both sides of each of its limits.
"""

import pytest

from logmirror.errors import UsageError
from logmirror.knobs import HEARTBEAT_SECS, METRICS_PORT, Knobs, read_knobs


def test_without_variables_the_defaults_hold():
    assert read_knobs({}) == Knobs(metrics_port=9090, heartbeat_ms=30_000)


@pytest.mark.parametrize(("text", "port"), [("0", 0), ("1", 1), ("65535", 65535), ("09090", 9090)])
def test_a_port_is_taken(text, port):
    assert read_knobs({METRICS_PORT: text}).metrics_port == port


@pytest.mark.parametrize(("text", "ms"), [("0", 0), ("1", 1000), ("86400", 86_400_000)])
def test_a_heartbeat_is_taken_in_seconds(text, ms):
    assert read_knobs({HEARTBEAT_SECS: text}).heartbeat_ms == ms


@pytest.mark.parametrize("text", ["", " ", "-1", "65536", "9090 ", "1e3", "off", "٣", "9" * 5000])
def test_what_is_no_port_is_a_usage_error_that_names_the_variable(text):
    with pytest.raises(UsageError, match="not a number") as caught:
        read_knobs({METRICS_PORT: text})
    assert caught.value.facts == {"variable": METRICS_PORT, "value": text}
    assert METRICS_PORT in caught.value.hint


@pytest.mark.parametrize("text", ["", "0.5", "86401", "30s"])
def test_what_is_no_interval_is_a_usage_error_that_names_the_variable(text):
    with pytest.raises(UsageError, match="not a number") as caught:
        read_knobs({HEARTBEAT_SECS: text})
    assert caught.value.facts["variable"] == HEARTBEAT_SECS
