"""A value passes exactly where Python's own decoder and parser accept it, and the first invalid
value is named.

Method: `bytes.decode` and a strict `json` check the same values: drawn ones, damaged ones, every
short byte sequence at every position in a machine word. Whole columns are checked too, from decoded
records and from Arrow, nulls and slices included. Memory: another process with bounded buffers.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.record_batches import OFFSET_END, relaxed
from logmirror.model import ColumnTypes, TimestampType
from logmirror.wire.columns import SCHEMA
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.gate import first_refused, first_refused_arrow
from logmirror.wire.kernels_text import DEPTH_MAX
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner

CHECKED = ("utf8", "json", "json-parseable")


def no_constant(text):
    raise ValueError(text)  # NaN and Infinity are not JSON


def passes(value, kind):
    """What the type means, by Python's own means."""
    if value is None or kind == "bytes":
        return True
    try:
        text = value.decode()
        if kind == "json-parseable":
            json.loads(text, parse_constant=no_constant)
    except ValueError:
        return False
    return True


def arrow(values, column="value"):
    """Rows with these values, the other column null."""
    keys, data = (values if column == name else [None] * len(values) for name in ("key", "value"))
    rows = [
        {
            "key": key,
            "value": value,
            "topic": "t",
            "partition": 0,
            "offset": 100 + index,
            "timestamp": 0,
            "timestampType": 0,
            "headers": [],
        }
        for index, (key, value) in enumerate(zip(keys, data, strict=True))
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def columns_of(values, column="value"):
    rows = [
        Record(100 + i, 0, TimestampType.CREATE_TIME, None, None, ())._replace(**{column: value})
        for i, value in enumerate(values)
    ]
    data = encode_reference(rows)
    listed = BatchScanner().scan(data, len(data))
    return next(RecordDecoder(1 << 22).decode(data, listed, first=0, end=OFFSET_END))


def all_refused(values, kind, column="value"):
    """Every row that is refused: the rows after one are checked again, as a slice."""
    types, batch, found = ColumnTypes(**{column: kind}), arrow(values, column), []
    for at in range(0, len(values), 200):
        left = batch.slice(at, 200)
        while (refused := first_refused_arrow(left, types)) is not None:
            assert refused.column == column
            found.append(refused.offset - 100)
            left = left.slice(refused.row + 1)
    return found


def assert_judged_as_by_python(values, column="value"):
    for kind in CHECKED:
        bad = [row for row, value in enumerate(values) if not passes(value, kind)]
        assert all_refused(values, kind, column) == bad
        refused = first_refused(columns_of(values, column), ColumnTypes(**{column: kind}))
        assert (refused and refused.row) == (bad[0] if bad else None)


def test_every_byte_before_special_ones_at_every_position_in_a_word():
    seconds = (0x20, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC2, 0xFF)
    pairs = [bytes(pair) for pair in itertools.product(range(256), seconds)]
    values = [b"x" * (number % 9) + pair + b"y" * 9 for number, pair in enumerate(pairs)]
    found = set(all_refused(values, "utf8"))
    assert found == {row for row, value in enumerate(values) if not passes(value, "utf8")}


def test_every_bound_of_utf8():
    edges = [0, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1]
    edges += [0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    few = [0x41, 0x7F, 0x80, 0xBF, 0xC0]
    values = [bytes(v) for v in itertools.product(edges, edges, few, few)]
    values += [value[:size] for value in values[:: len(few) ** 2] for size in (1, 2)]
    values += [chr(point).encode() for point in (0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10FFFF)]
    bad = [row for row, value in enumerate(values) if not passes(value, "utf8")]
    assert 0 < len(bad) < len(values)
    assert set(all_refused(values, "utf8")) == set(bad)


JSON = {
    "empty": b"",
    "only spaces": b" \t\r\n",
    "spaces around": b" \n[ 1 ,\t2 ]\r\n ",
    "other white space": b"\x0c1",
    "no-break space": "\u00a01".encode(),
    "byte order mark": b"\xef\xbb\xbf1",
    "two values": b"1 2",
    "a comma behind": b"[1,]",
    "a comma before": b"[,1]",
    "two commas": b"[1,,2]",
    "a comma in an object": b'{"a":1,}',
    "no colon": b'{"a" 1}',
    "no value": b'{"a":}',
    "a number as name": b"{1:2}",
    "no name": b"{,}",
    "twice a name": b'{"a":1,"a":2}',
    "names and spaces": b'{ "a" : 1 , "b" : [ ] , "c" : { } }',
    "wrong end of an array": b"[1}",
    "wrong end of an object": b'{"a":1]',
    "one end too many": b"[]]",
    "cut array": b"[1",
    "cut object": b'{"a"',
    "cut text": b'"abc',
    "cut escape": b'"abc\\',
    "cut hex": b'"\\u12',
    "only ends": b"]",
    "single quotes": b"'a'",
    "a comment": b"1 // one",
    "words": b"[true,false,null]",
    "word in capitals": b"True",
    "half a word": b"nul",
    "longer word": b"nulls",
    "longer false": b"falsey",
    "NaN": b"NaN",
    "infinity": b"-Infinity",
    "zero": b"0",
    "minus zero": b"-0",
    "only minus": b"-",
    "plus": b"+1",
    "leading zero": b"01",
    "minus leading zero": b"-01",
    "no digit before the point": b".5",
    "no digit behind the point": b"1.",
    "fraction": b"1.50",
    "exponent": b"1E400",
    "exponent with sign": b"1e-7",
    "exponent without digits": b"1e",
    "exponent with a sign only": b"1e+",
    "fraction in the exponent": b"1e1.5",
    "hexadecimal": b"0x10",
    "many digits": b"1" * 400,
    "every short escape": rb'"\"\\\/\b\f\n\r\t"',
    "unknown escape": rb'"\x41"',
    "escaped capital": rb'"\N"',
    "hex digits": rb'"\u00aFfA"',
    "no hex digit": rb'"\u00g0"',
    "half a surrogate": rb'"\ud800"',
    "a pair of surrogates": rb'"\ud83d\ude00"',
    "a control character in a text": b'"a\nb"',
    "a control character late in a text": b'"abcdefghijk\x1f"',
    "delete is no control character": b'"\x7f"',
    "a quote late in a text": b'"abcdefghijklmnop"',
    "an escape at the end of a word": b'"abcdefg\\"hijklmno"',
    "text beyond ASCII": '"ähnlich 😀"'.encode(),
    "text beyond ASCII outside": "ä".encode(),
    "NUL behind": b"1\x00",
    "nested": b'[{"a":[{"b":[]}]}]',
}


@pytest.mark.parametrize("value", JSON.values(), ids=JSON)
def test_the_grammar_of_json(value):
    expected = None if passes(value, "json-parseable") else 0
    refused = first_refused(columns_of([value]), ColumnTypes(value="json-parseable"))
    assert (refused and refused.row) == expected
    assert all_refused([b"1", value, b"{}"], "json-parseable") == ([] if expected is None else [1])


def test_depth_has_a_limit_that_is_reported():
    opened, deepest = b'[{"a":' * (DEPTH_MAX // 2), b"]" * (DEPTH_MAX // 2)
    whole = opened + b"1" + b"}]" * (DEPTH_MAX // 2)
    types = ColumnTypes(value="json-parseable")
    assert first_refused(columns_of([b"[" * DEPTH_MAX + b"]" * DEPTH_MAX, whole]), types) is None
    assert first_refused(columns_of([b"[" * DEPTH_MAX + deepest]), types).what == "is not JSON"
    refused = first_refused(columns_of([b"1", whole, b"[" + whole + b"]"]), types)
    assert (refused.row, refused.byte) == (2, 1 + len(opened) - len(b'{"a":'))
    assert refused.what == "has more than 1000 arrays and objects inside each other"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
texts = st.builds(
    lambda value, indent, plain: json.dumps(value, indent=indent, ensure_ascii=plain),
    json_values,
    st.none() | st.integers(0, 2),
    st.booleans(),
).map(str.encode)
damaged = st.builds(
    lambda text, at, piece: text[: at % (len(text) + 1)] + piece + text[at % (len(text) + 1) + 1 :],
    texts,
    st.integers(0, 10_000),
    st.sampled_from([b"", b'"', b"\\", b"{", b"]", b",", b"\x00", b"\xff", b"\xc3", b"0", b" "]),
)


@relaxed
@given(st.lists(st.none() | texts | damaged | st.binary(max_size=30), max_size=12))
def test_drawn_values_are_judged_as_by_python(values):
    if values:
        assert_judged_as_by_python(values)
        assert_judged_as_by_python(values, "key")


def test_many_damaged_values_are_judged_as_by_python():
    source = random.Random(7)
    document = {"id": 7, "text": 'größer \u20ac 😀 \\ "x"', "list": [1.5e3, -0, None, True, {}]}
    texts = [json.dumps(document, ensure_ascii=plain).encode() for plain in (True, False)]
    values = []
    for _ in range(8000):
        value = bytearray(source.choice(texts))
        for _ in range(source.randrange(3)):
            value[source.randrange(len(value))] = source.choice(b'"\\{}[],:0-eu \x00\x80\xc3\xf0z')
        values.append(
            bytes(value[: source.randrange(1, len(value) + 1)])
            if source.random() < 0.1
            else bytes(value)
        )
    for kind in ("utf8", "json-parseable"):
        bad = [row for row, value in enumerate(values) if not passes(value, kind)]
        assert 1000 < len(bad) < 7000
        assert all_refused(values, kind) == bad


def test_nulls_pass_and_keep_the_places_of_the_others():
    values = [None, b"{}", None, None, b"no", None, b"\xff"]
    assert_judged_as_by_python(values)
    assert_judged_as_by_python([None] * 3)
    assert all_refused([None, None], "json-parseable", "key") == []


def test_a_null_that_owns_bytes_is_not_looked_at():
    data = pa.py_buffer(b"\xff\xff{}")
    values = pa.Array.from_buffers(
        pa.binary(), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(b"\0\0\0\0\x02\0\0\0\x04\0\0\0"), data]
    )
    assert values.to_pylist() == [None, b"{}"]
    batch = arrow([b"", b""])
    batch = batch.set_column(1, batch.schema.field("value"), values)
    assert first_refused_arrow(batch, ColumnTypes(value="json-parseable")) is None


def test_an_empty_batch_passes():
    assert first_refused_arrow(arrow([]), ColumnTypes(key="utf8", value="json-parseable")) is None


def test_of_key_and_value_the_first_row_counts_and_then_the_key():
    def refused(rows):
        records = [
            Record(5 + i, 0, TimestampType.CREATE_TIME, key, value, ())
            for i, (key, value) in enumerate(rows)
        ]
        data = encode_reference(records)
        listed = BatchScanner().scan(data, len(data))
        columns = next(RecordDecoder(1 << 20).decode(data, listed, first=0, end=OFFSET_END))
        return first_refused(columns, ColumnTypes(key="utf8", value="json-parseable"))

    assert refused([(b"k", b"1"), (None, None)]) is None
    assert refused([(b"k", b"1"), (b"\xff", b"x")])[:3] == (1, 6, "key")
    assert refused([(b"k", b"x"), (b"\xff", b"1")])[:3] == (0, 5, "value")
    assert refused([(b"\xff", b"1"), (b"k", b"x")])[:3] == (0, 5, "key")
    # A value that is no JSON stands before one that is no text.
    assert refused([(b"k", b"{"), (b"k", b"\xff")])[:3] == (0, 5, "value")


def test_the_error_says_what_and_where():
    values = [b'{"a":1}', b'{"a":tru}']
    error = first_refused(columns_of(values), ColumnTypes(value="json-parseable")).error()
    assert (error.kind, error.message) == ("usage", "a value is not JSON")
    assert error.facts == {"column": "value", "type": "json-parseable", "offset": 101, "byte": 5}
    assert error.hint.startswith("the configuration says `values: {type: json-parseable}`")
    error = first_refused(columns_of([b"ab\xff"], "key"), ColumnTypes(key="json")).error()
    assert (error.message, error.facts["byte"]) == ("a key is not UTF-8", 2)


def test_a_long_ascii_column_is_looked_at_to_its_last_byte():
    values = [b"x" * size for size in range(300)]
    assert first_refused(columns_of(values), ColumnTypes(value="utf8")) is None
    for row in (1, 63, 64, 65, 299):
        values[row] = values[row][:-1] + b"\xff"
        refused = first_refused(columns_of(values), ColumnTypes(value="utf8"))
        assert (refused.row, refused.byte) == (row, row - 1)
        values[row] = b"x" * row


def test_damaged_texts_touch_nothing_outside_of_the_buffers():
    script = Path(__file__).with_name("hostile_text.py")
    ended = subprocess.run(
        [sys.executable, str(script), "200000"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report.pop("canaries") is True
    assert min(report.values()) > 2000, report
