"""Goal: the broker's error codes are Kafka's.

Method: kio's table, which is generated from Kafka's own source, is the reference.
"""

from __future__ import annotations

import kio.schema.errors

from logmirror.broker.error_codes import ErrorCode


def test_every_code_has_kafkas_name_and_value():
    kafka = {code.name.upper(): int(code) for code in kio.schema.errors.ErrorCode}

    assert {code.name: int(code) for code in ErrorCode}.items() <= kafka.items()
