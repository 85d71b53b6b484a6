"""No output shows the value of a property or the content of a file, in valid and invalid files.

Method: a canary is put wherever a secret can be, literally, from the environment and from a file,
in valid files and in files with many kinds of syntax errors. All output that a user or a log could
see is searched for it.
"""

import traceback

import pytest

from kit.runs.configs import mirror, text_of
from logmirror.config.settings import ConfigError, load_text

CANARY = "Tr0ub4dor&3"
WORD = "xyzzyplugh"  # a valid name in YAML

_LINES = [
    "- {canary}",
    "{canary}: [",
    "'{canary}",
    '"{canary}',
    "*{canary}",
    "&{canary} x",
    "!{canary} x",
    "!{canary}!x y",
    "!<{canary} x",
    "@{canary}",
    "`{canary}",
    "%{canary}",
    "|{canary}",
    ">{canary}",
    "{canary}: {canary}: {canary}",
    "[{canary}",
    "{{{canary}",
    '"\\x{canary}"',
    '"\\q{canary}"',
    "?{canary}",
    "\t{canary}",
    "{canary}\n{canary}",
    "\x07{canary}",
    "${{{canary}",
    "${{UNSET:-{canary}",
    "[{canary}, {{{canary}: {canary}}}]",
]


def visible(text, environ):
    """Return all visible output of loading `text`."""
    try:
        settings = load_text(text, environ=environ)
    except ConfigError as error:
        shown = [str(error), repr(error), repr(error.facts), error.hint]
        return "\n".join(shown + traceback.format_exception(error))
    return "\n".join([str(settings), repr(settings), repr(settings.mirrors[0].source)])


def with_property(value):
    text = text_of(mirror(source={"bootstrap-servers": "h:1", "properties": {"p": 0}}))
    return text.replace('"p": 0', f"p: {value}")


@pytest.mark.parametrize("line", _LINES)
@pytest.mark.parametrize("secret", [CANARY, WORD])
def test_a_broken_line_does_not_show_the_secret_in_it(line, secret):
    value = line.format(canary=secret)
    assert secret not in visible(with_property(value), {})
    assert secret not in visible(f"mirrors: []\nsasl.password: {value}\n", {})
    assert secret not in visible(f"a: {value}", {})


@pytest.mark.parametrize(
    "written", [CANARY, f'"{CANARY}"', "${SECRET}", "${UNSET:-" + CANARY + "}"]
)
@pytest.mark.parametrize("broken", [False, True])
def test_the_value_of_a_property_is_not_shown(written, broken):
    text = with_property(written)
    if broken:
        text = text.replace('"topic": "orders"', '"topic": 5, "oops": []')
    shown = visible(text, {"SECRET": CANARY})
    assert ("oops" in shown) is broken
    assert CANARY not in shown


def test_the_content_of_a_file_is_not_shown(tmp_path):
    secret = tmp_path / "password"
    secret.write_text(CANARY)
    for place in ("topic", "format", "enabled", "chain-start", "partitions", "flush"):
        text = text_of({**mirror(), place: f"${{file:{secret}}}"})
        assert CANARY not in visible(text, {})
        assert CANARY not in visible(
            text.replace(f'"${{file:{secret}}}"', f"${{file:{secret}}}"), {}
        )
    secret.write_bytes(CANARY.encode() + b"\xff")
    assert CANARY not in visible(with_property(f"${{file:{secret}}}"), {})


def test_spark_properties_are_not_shown():
    text = text_of(mirror(), spark={"properties": {"spark.hadoop.fs.s3a.secret.key": CANARY}})
    assert CANARY not in visible(text, {})
    assert CANARY not in visible(text.replace("local", "mesos").replace("spark.h", "h"), {})
