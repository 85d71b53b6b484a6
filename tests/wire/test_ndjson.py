"""A line holds exactly its record, in the fields and the order that the format defines.

Method: Python's json module writes the expected line; ours must be equal byte for byte, for any
records, any slice and any size of the output buffer: lines that do not fit are made in pieces.
"""

import base64
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.record_batches import OFFSET_END, relaxed, runs_of_batches
from logmirror.errors import InternalError, UsageError
from logmirror.model import TimestampType
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.ndjson import ndjson_pieces
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner


def columns_of(data):
    listed = BatchScanner().scan(data, len(data))
    return next(RecordDecoder(1 << 20).decode(data, listed, first=0, end=OFFSET_END), None)


def expected_line(record, topic, partition, *, utf8):
    def as_base64(data):
        return base64.b64encode(data).decode()

    as_text = bytes.decode if utf8 else as_base64
    line = {"topic": topic, "partition": partition, "offset": record.offset}
    if record.timestamp_ms != -1:
        line["timestamp_ms"] = record.timestamp_ms
    line["timestamp_type"] = record.timestamp_type.name.lower()
    if record.key is not None:
        line["key"] = as_text(record.key)
    if record.value is not None:
        line["value"] = as_text(record.value)
    if record.headers:
        line["headers"] = [
            {"key": key.decode()} | ({} if value is None else {"value": as_base64(value)})
            for key, value in record.headers
        ]
    return (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def written(columns, start, stop, *, out=None, **options):
    out = bytearray(1 << 16) if out is None else out
    options = {"topic": "orders", "partition": 0, "utf8": False} | options
    return b"".join(map(bytes, ndjson_pieces(columns, start, stop, out=out, **options)))


@relaxed
@given(runs_of_batches(), st.integers(0, 300), st.data())
def test_lines_are_what_json_would_write(drawn, room, data):
    batches, rows = drawn
    columns = columns_of(batches)
    if columns is None:
        return
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    lines = written(columns, start, stop, out=bytearray(room), topic='a"\\ü\n', partition=2**31 - 1)
    expected = [expected_line(r, 'a"\\ü\n', 2**31 - 1, utf8=False) for r in rows[start:stop]]
    assert lines == b"".join(expected)


texts = st.text(max_size=60) | st.text('ab"\\\n\x00\x1f\x7fé€😀', max_size=60)


@relaxed
@given(
    st.lists(st.tuples(st.none() | texts, st.none() | texts, texts), min_size=1, max_size=5),
    st.integers(0, 1000),
)
def test_text_is_escaped_as_json_would(drawn, room):
    rows = [
        Record(
            *(offset, -1, TimestampType.CREATE_TIME),
            *(None if text is None else text.encode() for text in (key, value)),
            ((name.encode(), b"\0"),),
        )
        for offset, (key, value, name) in enumerate(drawn)
    ]
    columns = columns_of(encode_reference(rows))
    lines = written(columns, 0, len(rows), utf8=True, out=bytearray(room))
    assert lines == b"".join(expected_line(row, "orders", 0, utf8=True) for row in rows)


def test_every_ascii_character_at_every_place_of_a_word():
    rows = []
    for code in range(128):
        text = bytes([code])
        rows += [b"x" * before + text + b"y" * 9 for before in range(9)]
    records = [Record(i, 0, TimestampType.CREATE_TIME, None, v, ()) for i, v in enumerate(rows)]
    lines = written(columns_of(encode_reference(records)), 0, len(records), utf8=True)
    assert lines == b"".join(expected_line(one, "orders", 0, utf8=True) for one in records)


@pytest.mark.parametrize("number", [0, 9, 10, 99, 10**18 - 1, 10**18, 2**63 - 2])
def test_numbers_at_their_ends(number):
    for timestamp in {number, -number, -number - 2, 2**63 - 1}:
        row = Record(number, timestamp, TimestampType.CREATE_TIME, None, None, ())
        data = encode_reference([row], timestamp_type=TimestampType.LOG_APPEND_TIME)
        line = written(columns_of(data), 0, 1)
        row = row._replace(timestamp_type=TimestampType.LOG_APPEND_TIME)
        assert line == expected_line(row, "orders", 0, utf8=False)


NOT_TEXT = {
    "lone continuation": b"\x80",
    "overlong slash": b"\xc0\xaf",
    "overlong, two bytes": b"\xc1\xbf",
    "overlong, three bytes": b"\xe0\x9f\xbf",
    "overlong, four bytes": b"\xf0\x8f\xbf\xbf",
    "surrogate": b"\xed\xa0\x80",
    "beyond the last character": b"\xf4\x90\x80\x80",
    "no lead byte": b"\xff",
    "cut, two bytes": b"abc\xc3",
    "cut, three bytes": b"abcdefgh\xe2\x82",
    "cut, four bytes": b"\xf0\x9f\x98",
    "bad second": b"\xe2\x28\xa1",
    "bad third": b"\xe2\x82\x28",
    "bad fourth": b"\xf0\x9f\x98\x28",
}


@pytest.mark.parametrize("bad", NOT_TEXT.values(), ids=NOT_TEXT)
@pytest.mark.parametrize("field", ["key", "value"])
@pytest.mark.parametrize("room", [0, 1 << 16])
def test_bytes_that_are_no_text_are_named_by_offset(field, bad, room):
    good = Record(3, 0, TimestampType.CREATE_TIME, b"k", b"v", ())
    columns = columns_of(encode_reference([good, good._replace(offset=8, **{field: bad})]))
    pieces, place = [], {"topic": "orders", "partition": 0}
    lines = ndjson_pieces(columns, 0, 2, out=bytearray(room), utf8=True, **place)
    with pytest.raises(UsageError, match="not UTF-8") as caught:
        pieces.extend(map(bytes, lines))
    assert caught.value.facts == place | {"offset": 8}
    assert b"".join(pieces).startswith(expected_line(good, "orders", 0, utf8=True))
    assert json.loads(written(columns, 1, 2))[field] == base64.b64encode(bad).decode()


@relaxed
@given(st.binary(max_size=12))
def test_text_is_accepted_exactly_where_python_accepts_it(data):
    columns = columns_of(
        encode_reference([Record(0, 0, TimestampType.CREATE_TIME, data, None, ())])
    )
    try:
        text = data.decode()
    except UnicodeDecodeError:
        with pytest.raises(UsageError):
            written(columns, 0, 1, utf8=True)
    else:
        assert json.loads(written(columns, 0, 1, utf8=True))["key"] == text


def test_a_header_key_that_is_no_text_is_refused_in_both_encodings():
    row = Record(8, 0, TimestampType.CREATE_TIME, b"k", b"v", ((b"ok", None), (b"\xff", b"x")))
    columns = columns_of(encode_reference([row]))
    for utf8, room in itertools.product((True, False), (0, 1 << 16)):
        with pytest.raises(UsageError, match="header key") as caught:
            written(columns, 0, 1, utf8=utf8, out=bytearray(room))
        assert (caught.value.facts["offset"], caught.value.facts["key"]) == (8, b"\xff")


LONG = {
    "plain": b"x" * 1_800_000,
    "escapes": b'"\x01' * 900_000,
    "three bytes": "€".encode() * 600_000,
    "four bytes": "😀".encode() * 450_000,
    "cut anywhere": b"a" + "é".encode() * 900_000,
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
@pytest.mark.parametrize("utf8", [False, True])
def test_a_long_line_is_made_in_pieces_of_a_fixed_size(value, utf8):
    """Pieces end inside characters and groups of three bytes; the line is the same."""
    rows = [
        Record(i, 5, TimestampType.CREATE_TIME, b"k", one, ((b"h", value), (b"n", None)))
        for i, one in enumerate((b"short", value, b"short again"))
    ]
    data = encode_reference(rows)
    listed = BatchScanner().scan(data, len(data))
    columns = next(RecordDecoder(1 << 24).decode(data, listed, first=0, end=OFFSET_END))
    sizes, lines = [], b""
    for piece in ndjson_pieces(
        columns, 0, 3, topic="orders", partition=0, out=bytearray(1 << 16), utf8=utf8
    ):
        sizes.append(len(piece))
        lines += piece
    assert lines == b"".join(expected_line(row, "orders", 0, utf8=utf8) for row in rows)
    assert max(sizes) <= 6 * (3 << 18)


def test_a_text_is_written_whole_where_it_fits_measured_though_its_upper_bound_does_not():
    """Six bytes for a byte would not fit: a buffer of 64 KiB takes a text of 60 KiB as it is."""
    row = Record(0, 0, TimestampType.CREATE_TIME, None, b"t" * 60_000, ())
    columns = columns_of(encode_reference([row]))
    options = {"topic": "orders", "partition": 0, "out": bytearray(1 << 16), "utf8": True}
    assert len(list(ndjson_pieces(columns, 0, 1, **options))) == 1


def test_no_rows_make_no_bytes_and_rows_beyond_the_columns_are_our_own_mistake():
    columns = columns_of(
        encode_reference([Record(0, 0, TimestampType.CREATE_TIME, None, None, ())])
    )
    assert written(columns, 1, 1) == b""
    for start, stop in ((0, 2), (-1, 1), (1, 0)):
        with pytest.raises(InternalError):
            written(columns, start, stop)
