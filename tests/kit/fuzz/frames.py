"""Requests of every API and version from Kafka's schema, whole or broken in one of many ways.

A request is a list of tokens, one for each length, count and value, so that a length can lie about
what follows it. kio's classes have the schema; the bytes are written here, because kio writes valid
requests only.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kit.fuzz import dictionary
from kit.judges.raw_client import message_class

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from kit.fuzz.dictionary import Words

_LAYOUTS: Final = {8: ">b", 16: ">h", 32: ">i", 64: ">q"}
_BITS: Final = {
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "timedelta_i32": 32,
    "timedelta_i64": 64,
}
_NULL_SHARES: Final = {
    "subscribed_topic_regex": 0.9,
    "group_instance_id": 0.8,
    "instance_id": 0.8,
    "assignments": 0.8,
}
"""How often a field is null: those that are usually."""

_MOST: Final = 3
_MANY: Final = 400
"""Entries of an array that is repeated (C.6.3: nested amplification)."""


class Token(NamedTuple):
    """A part of a request."""

    kind: str
    """`number`, `count`, `varint`, `text`, `tags` or `bytes`."""

    data: bytes


def uvarint(value: int) -> bytes:
    """Return an unsigned varint."""
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    return bytes([*out, value])


class Writer:
    """Writes requests with values that a `random.Random` draws."""

    def __init__(self, chance: random.Random, words: Words) -> None:
        self._chance = chance
        self._words = words

    def request(self, api_key: int, version: int, *, client_id: str) -> list[Token]:
        """Return a request without its size."""
        cls = message_class(api_key, version, "request")
        name = client_id.encode()
        correlation_id = self._chance.choice((7, 7, 0, -1))
        header = struct.pack(">hhih", api_key, version, correlation_id, len(name))
        tokens = [Token("number", header[:4]), Token("number", header[4:8])]
        tokens += [Token("count", header[8:]), Token("text", name)]
        tokens += [Token("tags", b"\0")] if cls.__flexible__ else []
        return tokens + self._struct(cls)

    def _struct(self, cls: Any) -> list[Token]:
        tokens: list[Token] = []
        tagged: list[tuple[int, list[Token]]] = []
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            found = self._field(field, hints[field.name], flexible=cls.__flexible__)
            if (tag := field.metadata.get("tag")) is None:
                tokens += found
            elif self._words.often(0.2):
                tagged.append((tag, found))
        if cls.__flexible__:
            data = uvarint(len(tagged))
            for tag, found in sorted(tagged):
                content = joined(found)
                data += uvarint(tag) + uvarint(len(content)) + content
            tokens.append(Token("tags", data))
        return tokens

    def _field(self, field: dataclasses.Field[Any], hint: Any, *, flexible: bool) -> list[Token]:
        parts = typing.get_args(hint)
        nullable = type(None) in parts
        if nullable:
            hint = next(part for part in parts if part is not type(None))
        kind = field.metadata.get("kafka_type")
        if typing.get_origin(hint) is not tuple:
            if nullable and self._words.often(self._null_share(field.name)):
                return self._null(kind, flexible=flexible)
            return self._value(field.name, kind, hint, flexible=flexible)
        if nullable and self._words.often(self._null_share(field.name)):
            return self._null("array", flexible=flexible)
        count = self._chance.choice((0, 1, 1, 1, 2, _MOST))
        of = typing.get_args(hint)[0]
        entries = [self._value(field.name, kind, of, flexible=flexible) for _ in range(count)]
        if entries and self._words.often(0.02):
            entries = entries[:1] * self._chance.choice((2, 10, _MANY))
        size = uvarint(len(entries) + 1) if flexible else struct.pack(">i", len(entries))
        head = Token("varint" if flexible else "count", size)
        return [head, *(token for entry in entries for token in entry)]

    @staticmethod
    def _null_share(field: str) -> float:
        return _NULL_SHARES.get(field, 0.2)

    @staticmethod
    def _null(kind: str | None, *, flexible: bool) -> list[Token]:
        if kind == "uuid":
            return [Token("bytes", bytes(16))]
        if kind is None:
            return [Token("number", b"\xff")]
        if flexible:
            return [Token("varint", b"\0")]
        return [Token("count", b"\xff\xff" if kind == "string" else b"\xff\xff\xff\xff")]

    def _value(self, name: str, kind: str | None, hint: Any, *, flexible: bool) -> list[Token]:
        if kind is None:
            return self._struct(hint)
        if (bits := _BITS.get(kind)) is not None:
            value = self._words.integer(name, bits)
            return [Token("number", struct.pack(_LAYOUTS[bits], value))]
        if kind == "bool":
            return [Token("number", bytes([self._chance.randrange(2)]))]
        if kind in {"float64", "uuid"}:
            number = struct.pack(">d", self._chance.choice(dictionary.FLOATS))
            return [Token("bytes", number if kind == "float64" else self._words.uuid(name).bytes)]
        is_text = kind == "string"
        data = self._words.text(name).encode()[: 2**15 - 1] if is_text else self._blob(name, kind)
        plain = struct.pack(">h" if is_text else ">i", len(data))
        size = Token("varint", uvarint(len(data) + 1)) if flexible else Token("count", plain)
        return [size, Token("text" if is_text else "bytes", data)]

    def _blob(self, name: str, kind: str) -> bytes:
        if kind == "records":
            return self._chance.choice(dictionary.batches()[: 8 if self._words.often() else None])
        if name == "auth_bytes":
            return self._chance.choice(dictionary.SASL_TOKENS)
        return self._chance.choice((b"", b"\0\0\0\0\0\1\0\4fuzz\xff\xff\xff\xff", bytes(300)))


def joined(tokens: list[Token]) -> bytes:
    """Return the bytes of a request."""
    return b"".join(token.data for token in tokens)


class Breaker:
    """Breaks requests in one of many ways, each a rule of the dictionary."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._ways: list[Callable[[list[Token]], bytes]] = [
            self._number,
            self._length,
            self._text,
            self._tags,
            self._cut,
            self._flipped,
            self._header,
            self._behind,
            self._repeated,
            self._batch,
        ]

    def broken(self, tokens: list[Token]) -> bytes:
        """Return the bytes of a broken request."""
        return self._chance.choice(self._ways)(tokens)

    def _replaced(self, tokens: list[Token], kinds: tuple[str, ...], data: bytes | None) -> bytes:
        places = [place for place, token in enumerate(tokens) if token.kind in kinds]
        if not places:
            return self._flipped(tokens)
        place = self._chance.choice(places)
        if data is None:
            bits = 8 * len(tokens[place].data)
            if bits not in _LAYOUTS:
                return self._flipped(tokens)
            values = dictionary.INTEGERS[bits]
            data = struct.pack(_LAYOUTS[bits], self._chance.choice(values))
        return joined([*tokens[:place], Token("bytes", data), *tokens[place + 1 :]])

    def _number(self, tokens: list[Token]) -> bytes:
        return self._replaced(tokens, ("number", "count"), None)

    def _length(self, tokens: list[Token]) -> bytes:
        if any(token.kind == "varint" for token in tokens):
            wrong = uvarint(max(0, self._chance.choice(dictionary.LENGTHS)))
            data = self._chance.choice((*dictionary.VARINTS, wrong))
            return self._replaced(tokens, ("varint",), data)
        return self._replaced(tokens, ("count",), None)

    def _text(self, tokens: list[Token]) -> bytes:
        return self._replaced(tokens, ("text",), self._chance.choice(dictionary.BAD_TEXT))

    def _tags(self, tokens: list[Token]) -> bytes:
        return self._replaced(tokens, ("tags",), self._chance.choice(dictionary.TAGS))

    def _cut(self, tokens: list[Token]) -> bytes:
        data = joined(tokens)
        return data[: self._chance.randrange(len(data))]

    def _flipped(self, tokens: list[Token]) -> bytes:
        data = bytearray(joined(tokens))
        for _ in range(self._chance.choice((1, 1, 2, 8))):
            data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
        return bytes(data)

    def _header(self, tokens: list[Token]) -> bytes:
        data = bytearray(joined(tokens))
        position, layout = self._chance.choice(((0, ">h"), (2, ">h"), (4, ">i"), (8, ">h")))
        bits = 8 * struct.calcsize(layout)
        near = (*dictionary.INTEGERS[bits], self._chance.randrange(100))
        struct.pack_into(layout, data, position, self._chance.choice(near))
        return bytes(data)

    def _behind(self, tokens: list[Token]) -> bytes:
        return joined(tokens) + self._chance.randbytes(self._chance.choice((1, 8, 3000)))

    def _repeated(self, tokens: list[Token]) -> bytes:
        first = self._chance.randrange(len(tokens))
        last = min(len(tokens), first + self._chance.choice((1, 2, 5)))
        times = self._chance.choice((2, 3, 50))
        return joined([*tokens[:first], *tokens[first:last] * times, *tokens[last:]])

    def _batch(self, tokens: list[Token]) -> bytes:
        """Break what is inside bytes: a batch, a subscription, a token."""
        places = [
            place for place, token in enumerate(tokens) if token.kind == "bytes" and token.data
        ]
        if not places:
            return self._flipped(tokens)
        place = self._chance.choice(places)
        changed = bytearray(tokens[place].data)
        for _ in range(self._chance.choice((1, 3))):
            changed[self._chance.randrange(len(changed))] = self._chance.randrange(256)
        is_batch = len(changed) > dictionary.BATCH_HEAD and self._chance.random() < 0.8
        data = dictionary.sealed(changed) if is_batch else bytes(changed)
        return joined([*tokens[:place], Token("bytes", data), *tokens[place + 1 :]])


def stream(frame: bytes, chance: random.Random) -> bytes:
    """Return a frame with its size, which is wrong now and then (C.6.1)."""
    size = len(frame)
    if chance.random() < 0.03:
        size = chance.choice((-1, 0, 3, 7, size - 1, size + 1, 100_000_000, 2**31 - 1))
    return struct.pack(">i", size) + frame
