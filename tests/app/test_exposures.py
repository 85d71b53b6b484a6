"""Settings that expose a connection are warned of; the others are not.

Method: a table of settings; the rows of `validate --check` and the log of a run for one of them.
"""

import logging

import pytest

from logmirror.app import preflight
from logmirror.app.run import log_exposures
from logmirror.app.specs import mirror_specs
from logmirror.cluster.exposures import exposures
from logmirror.cluster.properties import connection_settings
from logmirror.config.settings import load_text
from logmirror.errors import UnavailableError

PASSWORD = {"sasl.username": "u", "sasl.password": "canary-s3cret"}
UNSIGNED = {
    "enable.sasl.oauthbearer.unsecure.jwt": "true",
    "sasl.oauthbearer.config": "principal=u",
}
VERIFICATION = "enable.ssl.certificate.verification"
NAMES = "ssl.endpoint.identification.algorithm"


def sasl(protocol, mechanism):
    secret = UNSIGNED if mechanism == "OAUTHBEARER" else PASSWORD
    return {"security.protocol": protocol, "sasl.mechanism": mechanism, **secret}


@pytest.mark.parametrize(
    ("properties", "named"),
    [
        ({}, []),
        ({"security.protocol": "SSL"}, []),
        ({"security.protocol": "SSL", VERIFICATION: "false"}, [VERIFICATION]),
        ({"security.protocol": "SSL", VERIFICATION: "false", NAMES: "none"}, [VERIFICATION]),
        ({"security.protocol": "SSL", NAMES: "none"}, [NAMES]),
        (sasl("SASL_SSL", "PLAIN"), []),
        ({**sasl("SASL_SSL", "PLAIN"), VERIFICATION: "false"}, [VERIFICATION]),
        (sasl("SASL_PLAINTEXT", "PLAIN"), ["security.protocol"]),
        (sasl("SASL_PLAINTEXT", "OAUTHBEARER"), ["security.protocol"]),
        (sasl("SASL_PLAINTEXT", "SCRAM-SHA-256"), []),
        (sasl("SASL_PLAINTEXT", "SCRAM-SHA-512"), []),
        (sasl("SASL_SSL", "OAUTHBEARER"), []),
    ],
)
def test_what_exposes_a_connection_is_named(properties, named):
    found = exposures(connection_settings("h:1", properties))
    assert [one.name for one in found] == named
    assert all(one.message and one.suggestion for one in found)


CONFIG = """
mirrors:
- name: orders
  topic: orders
  partition: 0
  source:
    bootstrap-servers: "a:9092"
    properties: {security.protocol: SASL_PLAINTEXT, sasl.mechanism: PLAIN, sasl.username: u,
                 sasl.password: canary-s3cret}
  destinations:
  - name: standby
    type: kafka
    bootstrap-servers: "b:9093"
    properties: {security.protocol: SSL, enable.ssl.certificate.verification: "false"}
"""


def test_a_run_logs_a_warning_for_each(caplog):
    specs = mirror_specs(load_text(CONFIG, environ={}))
    log_exposures([*specs, *specs])
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    found = [(record.facts["servers"], record.facts["property"]) for record in caplog.records]
    assert found == [("a:9092", "security.protocol"), ("b:9093", VERIFICATION)]
    assert "canary-s3cret" not in str([vars(record) for record in caplog.records])


class Unreachable:
    """Clients of clusters that do not respond."""

    def __init__(self, _budget_ms):
        pass

    def __call__(self, _settings):
        raise UnavailableError("no response")

    def close(self):
        pass


def test_a_check_has_a_row_for_each_although_nothing_responds(monkeypatch):
    monkeypatch.setattr(preflight, "Clients", Unreachable)
    rows = preflight.check(load_text(CONFIG, environ={}))
    found = [(row.destination, row.what) for row in rows if row.severity == "warning"]
    assert found == [("", "security.protocol"), ("standby", VERIFICATION)]
    assert all(row.advice for row in rows if row.severity == "warning")
