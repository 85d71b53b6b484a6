"""Text is parsed into values exactly as YAML 1.2 specifies, and each value has its place.

Method: properties over generated documents (JSON is YAML, so a JSON document must round-trip),
tables of scalars on which versions of YAML disagree, and hostile files.
"""

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.config.source import MAX_DEPTH, MAX_NODES, SourceMap, parse, resolve_plain

_TEXTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Co"], exclude_characters="$\ufeff\ufffe\uffff"),
    max_size=12,
)
_SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | _TEXTS
_DOCUMENTS = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_TEXTS.filter(lambda key: key not in ("", "<<")), inner, max_size=4)
    ),
    max_leaves=20,
)


def read(text, environ=None):
    source = parse(text, environ=environ or {})
    assert source.problems == []
    return source.root


def messages(text, environ=None):
    return [problem.message for problem in parse(text, environ=environ or {}).problems]


@pytest.mark.mirror_v3("ENV-19")
@given(_DOCUMENTS.filter(lambda document: document is not None))
def test_json_round_trips(document):
    assert read(json.dumps(document, ensure_ascii=False)) == document


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("n", "n"),
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("tRue", "tRue"),
        ("null", None),
        ("~", None),
        ("", None),
        ("12:30", "12:30"),
        ("00:05", "00:05"),
        ("190:20:30", "190:20:30"),
        ("010", "010"),
        ("0", 0),
        ("-0", 0),
        ("+7", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("1e3", 1000.0),
        ("1.50", 1.5),
        ("01.5", "01.5"),
        (".5", 0.5),
        (".", "."),
        (".inf", ".inf"),
        ("2026-01-01", "2026-01-01"),
        ("=", "="),
        ("9" * 40, int("9" * 40)),
        ("9" * 41, "9" * 41),
    ],
)
def test_unquoted_scalars_mean_what_yaml_1_2_says(written, value):
    found = read(f"a: {written}\n")["a"]
    assert found == value
    assert type(found) is type(value)
    assert resolve_plain(written) == value


@pytest.mark.parametrize("quoted", ["'12'", '"12"', "|-\n  12", ">-\n  12"])
def test_a_quoted_scalar_is_text(quoted):
    assert read(f"a: {quoted}\n") == {"a": "12"}


def test_mappings_keep_scalars_as_written():
    root = read("a: 0123\nb: 0x10\nc: 1.50\nd: ${X}\ne: true\nf: [1]\ng: {}\n", {"X": "007"})
    assert isinstance(root, SourceMap)
    assert root.texts == {"a": "0123", "b": "0x10", "c": "1.50", "d": "007", "e": "true"}


def test_every_value_has_its_place():
    source = parse("a:\n  - b: 1\n    c.d: {e: 2}\n  - 3\n", environ={})
    places = {
        path: source.locations.place_of(path) for path in ("a", "a[0].b", "a[0].c.d.e", "a[1]")
    }
    assert places == {"a": (1, 1), "a[0].b": (2, 5), "a[0].c.d.e": (3, 11), "a[1]": (4, 5)}


def test_an_absent_setting_has_the_place_of_its_nearest_parent():
    locations = parse("a:\n  - b: 1\n", environ={}).locations
    assert locations.line_of("a[0].missing.deeper") == 2
    assert locations.line_of("a[7]") == 1
    assert locations.line_of("z") is None
    assert locations.line_of("") is None


def test_references_do_not_move_what_follows_them():
    source = parse("{a: ${LONG:-some default}, b: 1}", environ={})
    assert source.root == {"a": "some default", "b": 1}
    assert source.locations.place_of("b") == (1, 28)


# -- references ------------------------------------------------------------------------------------


@pytest.mark.mirror_v3(
    "ENV-01",
    "ENV-02",
    "ENV-04",
    "ENV-05",
    "ENV-06",
    "ENV-07",
    "ENV-08",
    "ENV-09",
    "ENV-10",
    "ENV-12",
    "ENV-13",
    "ENV-14",
    "ENV-18",
)
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("no references", "no references"),
        ("${SET}", "value"),
        ("${SET:-other}", "value"),
        ("${UNSET:-other}", "other"),
        ("${UNSET:-}", None),
        ('"${UNSET:-}"', ""),
        ("${EMPTY}", None),
        ("${EMPTY:-other}", None),
        ('"${EMPTY:-other}"', ""),
        ("${UNSET:-a: b # c}", "a: b # c"),
        ("$$", "$"),
        ("$${SET}", "${SET}"),
        ("$$${SET}", "$value"),
        ("cash$", "cash$"),
        ("$SET", "$SET"),
        ("${123}", "${123}"),
        ("${a-b}", "${a-b}"),
        ("${SET}-${SET}", "value-value"),
        ("${NESTED}", "${SET} $$"),
        ("${NUMBER}", 12),
        ('"${NUMBER}"', "12"),
        ("${NUMBER}0", 120),
        ("${TRUE}", True),
        ("${YES}", "yes"),
        ("${LINES}", "one\ntwo: {three"),
        ("[${SET}, ${NUMBER}]", ["value", 12]),
        ("{k: ${SET}}", {"k": "value"}),
        ("|-\n  a ${SET}\n  b ${SET}", "a value\nb value"),
        ("'it''s ${SET}'", "it's value"),
        ('"\\t${SET}"', "\tvalue"),
    ],
)
def test_references_are_resolved(written, value):
    environ = {
        "SET": "value",
        "EMPTY": "",
        "NESTED": "${SET} $$",
        "NUMBER": "12",
        "TRUE": "true",
        "YES": "yes",
        "LINES": "one\ntwo: {three",
    }
    assert read(f"a: {written}\n", environ) == {"a": value}


def test_a_reference_in_a_comment_is_a_comment():
    assert read("# ${UNSET} ${unclosed $$\na: 1 # ${file:/nowhere}\n") == {"a": 1}


@pytest.mark.mirror_v3("ENV-03", "ENV-14", "ENV-16")
def test_every_reference_without_a_value_is_reported_with_its_place():
    # All of them, not the first
    problems = parse("a: ${ONE}\nb:\n  - x: 1\n  - ${TWO}-${THREE}\n", environ={}).problems
    assert [(p.path, p.line, p.column, p.message) for p in problems] == [
        ("a", 1, 1, "the environment variable ONE is not set"),
        ("b[1]", 4, 5, "the environment variable TWO is not set"),
        ("b[1]", 4, 5, "the environment variable THREE is not set"),
    ]
    assert problems[0].suggestion == "set it or write ${ONE:-default}"


@pytest.mark.mirror_v3("ENV-11")
def test_a_reference_that_is_not_closed_is_reported():
    assert messages("a: ${OPEN\n") == ["a reference `${` is not closed"]
    assert messages('a: "${OPEN:-x"\n') == ["a reference `${` is not closed"]


def test_a_key_cannot_be_a_reference():
    assert messages("${NAME}: 1\n", {"NAME": "x"}) == [
        "a key must be a plain word, without tag or reference"
    ]


@given(_TEXTS, st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_no_value_can_change_the_structure(before, value):
    root = read(f"a: {json.dumps(before, ensure_ascii=False)}\nb: '${{X}}'\nc: 1\n", {"X": value})
    assert root == {"a": before, "b": value, "c": 1}


def test_more_references_than_one_digit_can_number():
    lines = "".join(f"k{i}: ${{X{i}}}\n" for i in range(3000))
    root = read(lines, {f"X{i}": f"v{i}" for i in range(3000)})
    assert root == {f"k{i}": f"v{i}" for i in range(3000)}


def test_a_text_that_spells_a_placeholder_is_not_resolved():
    written = r'a: "\U0010F000\U0010F010\U0010F013"' + "\nb: ${X}\n"
    assert read(written, {"X": "x"}) == {"a": "\U0010f000\U0010f010\U0010f013", "b": "x"}
    assert messages("a: \U0010f000\n") == ["a character of Unicode's last private use plane"]


def test_a_file_is_inserted_without_its_trailing_newline(tmp_path):
    secret = tmp_path / "secret"
    for content, value in [("s", "s"), ("s\n", "s"), ("s\r\n", "s"), ("s\n\n", "s\n"), ("", None)]:
        secret.write_bytes(content.encode())
        assert read(f"a: ${{file:{secret}}}\n") == {"a": value}
    secret.write_text("${X} $$ 'quoted'")
    assert read(f"a: {{b: '${{file:{secret}}}'}}\n") == {"a": {"b": "${X} $$ 'quoted'"}}


def test_an_unreadable_file_reference_is_reported_by_name(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "large").write_bytes(b"x" * 65537)
    os.mkfifo(tmp_path / "pipe")
    expected = {
        "absent": "the file cannot be read: no such file or directory",
        "latin": "it is not UTF-8 text",
        "large": "the file is larger than 65536 bytes",
        "pipe": "it is not a regular file",
        ".": "the file cannot be read: is a directory",
    }
    for name, reason in expected.items():
        path = f"{tmp_path}/{name}"
        assert messages(f"a: ${{file:{path}}}\n") == [f"file {path!r}: {reason}"]


# -- not supported ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "the file is empty"),
        ("# nothing\n", None, "the file is empty"),
        ("---\n...\n", None, "the file is empty"),
        ("a: 1\n---\nb: 2\n", 2, "a second document begins"),
        ("a: 1\nb: 2\na: 3\n", 3, "duplicate key"),
        ("a: {b: 1, 'b': 2}\n", 1, "duplicate key"),
        ("a: !!python/object:os.system x\n", 1, "tags (`!...`) are not supported"),
        ("a: !secret x\n", 1, "tags (`!...`) are not supported"),
        ("a: *nowhere\n", 1, "this alias (`*...`) has no anchor"),
        ("a: &me [1, *me]\n", 1, "this alias (`*...`) has no anchor"),
        ("a: &x 1\nb: &x 2\n", 2, "duplicate anchor"),
        ("<<: {a: 1}\n", 1, "merge keys (`<<`) are not part of YAML 1.2"),
        ("[a]: 1\n", 1, "a key must be a word"),
        ("? {a: 1}\n: 1\n", 1, "a key must be a word"),
        ("!x a: 1\n", 1, "a key must be a plain word, without tag or reference"),
        ('"": 1\n', 1, "a key is missing before the colon"),
        ('a: "\\ud800"\n', 1, "not valid text: half of a surrogate pair"),
        ("a: 1\nb: \x07\n", 2, "a character that YAML does not allow"),
    ],
)
def test_unsupported_yaml_is_reported_with_its_line(text, line, message):
    assert [(p.line, p.message) for p in parse(text, environ={}).problems] == [(line, message)]


@pytest.mark.parametrize("text", ["a: [1\n", "a: 'x\n", "a: b: c\n", "\ta: 1\n", "a: @x\n", "{a\n"])
def test_invalid_yaml_is_one_problem_with_a_place(text):
    (problem,) = parse(text, environ={}).problems
    assert problem.message.startswith("not YAML: ")
    assert problem.line is not None
    assert problem.column is not None


def test_windows_lines_and_a_byte_order_mark_change_nothing():
    assert read("\ufeffa: 1\r\nb: ${X}\r\n", {"X": "x"}) == {"a": 1, "b": "x"}


def test_aliases_repeat_a_value_with_a_path_of_each():
    source = parse("a: &x {b: [1, ${MISSING}]}\nc: *x\n", environ={})
    assert [(p.path, p.line) for p in source.problems] == [("a.b[1]", 1), ("c.b[1]", 1)]
    assert read("a: &x {b: 1}\nc: [*x, *x]\n") == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}


def test_a_billion_laughs_attack_is_stopped():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]\n"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)]
    started = time.monotonic()
    assert messages("".join(lines)) == [f"more than {MAX_NODES} values after resolving aliases"]
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused(opening):
    assert messages(opening * 100_000) == [f"nested more than {MAX_DEPTH} levels deep"]
    inside = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert messages(inside) == []
    assert messages(f"[{inside}]") == [f"nested more than {MAX_DEPTH} levels deep"]
