"""Error codes have the meaning that Kafka gives them.

Method: the table is compared with kio's, which is generated from Kafka's own source.
"""

import pickle

import pytest
from kio.schema.errors import ErrorCode

from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError, UsageError
from logmirror.wire.messages import ERRORS, api_error, error_of

CODES = [code for code in ErrorCode if code != ErrorCode.none]


def test_every_code_of_kafka_is_known_and_no_other():
    assert set(ERRORS) == {int(code) for code in CODES}


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_name_and_retriable_are_kafkas(code):
    known = ERRORS[int(code)]
    assert known.code == int(code)
    assert known.name == code.name.upper()
    assert known.retriable == code.retriable


def test_only_retriable_errors_refresh_metadata():
    assert all(known.retriable for known in ERRORS.values() if known.stale_metadata)


def test_every_text_fits_after_a_colon():
    for known in ERRORS.values():
        assert issubclass(known.kind, LogmirrorError)
        assert known.text
        assert not known.text.endswith(".")
        assert not known.text[0].isupper() or known.text.startswith("SASL ")


def test_an_error_carries_its_code_its_facts_and_a_hint_and_survives_pickling():
    error = api_error(29, action="could not fetch", topic="t", partition=3)
    assert type(error) is UsageError
    assert error.facts == {
        "topic": "t",
        "partition": 3,
        "code": 29,
        "error": "TOPIC_AUTHORIZATION_FAILED",
    }
    assert "grant" in error.hint
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.facts, copy.hint) == (UsageError, error.facts, error.hint)


def test_a_code_from_the_future_claims_nothing_about_our_data():
    error = api_error(9999, action="could not fetch")
    assert type(error) is UnavailableError
    assert error.facts["error"] == "ERROR_9999"
    assert not error_of(9999).retriable


def test_a_write_whose_outcome_is_open_is_not_called_failed():
    for code in (7, 13, 20):
        assert type(api_error(code, action="could not produce")) is OutcomeUnknownError
