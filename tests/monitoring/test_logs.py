"""What log events look like on stderr.

Method: events are formatted and read again, text by a person's rule, JSON by a parser.
"""

import json
import logging
import sys

from logmirror.monitoring.logs import JsonLine, TextLine


def event(message, facts=None, **fields):
    record = logging.LogRecord("logmirror.x", logging.INFO, __file__, 1, message, (), None)
    record.created = 1_700_000_000.1234
    if facts is not None:
        record.facts = facts
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_text_is_time_level_event_and_facts():
    line = TextLine().format(event("flushed", {"mirror": "orders", "from": 0, "to": 99}))
    assert line == "2023-11-14T22:13:20.123Z INFO flushed mirror=orders from=0 to=99"


def test_text_quotes_what_would_break_the_line():
    line = TextLine().format(event("flow waits", {"error": "no route\nto host", "path": ""}))
    assert line.endswith(r'flow waits error="no route\nto host" path=""')


def test_json_has_the_same_facts_with_their_types():
    line = JsonLine().format(event("flushed", {"mirror": "orders", "to": 99, "odd": {1}}))
    assert json.loads(line) == {
        "at": "2023-11-14T22:13:20.123Z",
        "level": "INFO",
        "event": "flushed",
        "mirror": "orders",
        "to": 99,
        "odd": "{1}",
    }
    assert "\n" not in line


def test_no_fact_replaces_time_level_or_event():
    found = json.loads(JsonLine().format(event("flushed", {"event": "x", "level": 1, "a": 2})))
    assert (found["event"], found["level"], found["a"]) == ("flushed", "INFO", 2)


def test_both_formats_include_exceptions():
    try:
        raise ValueError("odd")  # noqa: TRY301  # it is what is shown
    except ValueError:
        record = event("failed", exc_info=sys.exc_info())
    assert "ValueError: odd" in TextLine().format(record)
    assert "ValueError: odd" in json.loads(JsonLine().format(record))["exception"]
