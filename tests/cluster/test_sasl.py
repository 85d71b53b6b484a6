"""SCRAM: too few iterations are refused before anything derived from the password is sent.

Method: the broker's side of the exchange is a function with the messages of RFC 5802.
"""

import base64

import pytest

from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.properties import connection_settings
from logmirror.cluster.sasl import SCRAM_ITERATIONS_MIN, authenticate
from logmirror.errors import UsageError


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("iterations", [1, 0, -1, SCRAM_ITERATIONS_MIN - 1, SCRAM_ITERATIONS_MIN])
def test_few_iterations_are_refused_before_a_proof_is_sent(mechanism, iterations):
    settings = connection_settings(
        "h:1",
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": mechanism,
            "sasl.username": "alice",
            "sasl.password": "canary-s3cret",
        },
    )
    sent = []

    def exchange(data):
        sent.append(data)
        nonce = sent[0].partition(b"r=")[2]
        salt = base64.b64encode(b"salt-of-16-bytes")
        return b"r=%sserver,s=%s,i=%d" % (nonce, salt, iterations)

    with pytest.raises(UsageError) as caught:
        authenticate(settings, SYSTEM_CLOCK, exchange, deadline_ms=0)
    if iterations < SCRAM_ITERATIONS_MIN:
        assert caught.value.facts == {"iterations": iterations, "minimum": 4096}
        assert len(sent) == 1
    else:  # the proof is sent; then this broker fails to show that it knows the password
        assert "iterations" not in caught.value.facts
        assert len(sent) == 2
        assert b",p=" in sent[1]
