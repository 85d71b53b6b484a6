"""What clients have broken servers with: values, names, batches and login tokens.

The rules C.6.1 to C.6.9 are classes of bad input to a server of Kafka's protocol:

    1  frame size              4  record batches          7  SASL
    2  request header          5  decompression bombs     8  requests for brokers only
    3  arrays and strings      6  flow                    9  names of groups and topics
"""

from __future__ import annotations

import functools
import struct
import uuid
from typing import TYPE_CHECKING, Final, TypeVar

from logmirror.wire.compression import Codec, compress
from logmirror.wire.kernels_crc32c import crc32c_at
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import address_of, as_bytes_array

if TYPE_CHECKING:
    import random

_T = TypeVar("_T")

TOPIC: Final = "fuzz"
GROUP: Final = "fuzz-group"
TRANSACTIONAL_ID: Final = "fuzz-id"

NAMES: Final = (
    "",
    ".",
    "..",
    "a/b",
    "../up",
    "/",
    "a\0b",
    "__consumer_offsets",
    "__transaction_state",
    "x" * 249,
    "x" * 250,
    "x" * 32_767,
    "\N{SNOWMAN}",
    "\N{RIGHT-TO-LEFT OVERRIDE}x",
    "%2e%2e",
    "*",
    "User:*",
    "a,b",
    "con",
    " ",
    "\n",
)
"""C.6.9."""

SETTINGS: Final = (
    ("cleanup.policy", "compact"),
    ("cleanup.policy", "delete,compact,x"),
    ("segment.bytes", "-1"),
    ("segment.bytes", "99999999999999999999"),
    ("retention.ms", "1"),
    ("max.message.bytes", "0"),
    ("flush.messages", "1"),
    ("message.timestamp.type", "LogAppendTime"),
    ("min.insync.replicas", "2"),
    ("compression.type", "zstd"),
    ("no.such.setting", "1"),
    ("", ""),
)
QUOTAS: Final = ("producer_byte_rate", "consumer_byte_rate", "request_percentage", "x", "")
ENTITY_TYPES: Final = ("user", "client-id", "ip", "group", "")
QUOTA_NAMES: Final = ("x", "10.0.0.1", "", "y" * 300)
"""Not of a client that fuzzes, which would be throttled."""

INTEGERS: Final = {
    8: (-128, -2, -1, 0, 1, 2, 3, 4, 5, 127),
    16: (-(2**15), -2, -1, 0, 1, 2, 255, 2**15 - 1),
    32: (-(2**31), -2, -1, 0, 1, 2, 100, 65_536, 2**31 - 1),
    64: (-(2**63), -4, -3, -2, -1, 0, 1, 1_700_000_000_000, 2**31, 2**63 - 1),
}
"""C.6.3 and C.6.6: ends of ranges, and values that have a meaning of their own."""

FLOATS: Final = (0.0, -0.0, 1.0, 0.5, -1.0, 1e300, 5e-324, float("inf"), float("nan"))
BAD_TEXT: Final = (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80")
LENGTHS: Final = (-(2**31), -2, -1, 0, 1, 50_001, 2**24, 2**31 - 1)
VARINTS: Final = (
    b"\x80\x80\x80\x80\x80\x00",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\x1f",
    b"\x81\x00",
    b"\xff" * 10,
    b"\x80",
)
"""C.6.3: overlong, the largest, more than 32 bits, without an end."""

TAGS: Final = (
    b"\x02\x00\x00\x00\x00",
    b"\x02\x01\x00\x00\x00",
    b"\x01\x00\xff\xff\xff\xff\x07",
    b"\xff\xff\x03" + b"\x00\x00" * 10,
    b"\x01\x00\x00",
    b"\x01\x01\x00",
    b"\x01\x07\x01x",
)
"""C.6.3: twice, out of order, a size that lies, more than there are, known tags without content."""


def sealed(batch: bytes | bytearray) -> bytes:
    """Return a changed batch with the checksum that fits it."""
    changed = bytearray(batch)
    address = address_of(as_bytes_array(changed))
    changed[17:21] = crc32c_at(address + 21, len(changed) - 21).to_bytes(4)
    return bytes(changed)


def _with(layout: str, position: int, value: int) -> bytes:
    changed = bytearray(_GOOD)
    struct.pack_into(layout, changed, position, value)
    return sealed(changed)


def _around(body: bytes, *, codec: int, count: int = 3) -> bytes:
    """Return a batch of `count` records whose body is as given."""
    changed = bytearray(_GOOD[:61] + body)
    struct.pack_into(">i", changed, 8, len(changed) - 12)
    struct.pack_into(">h", changed, 21, codec)
    struct.pack_into(">i", changed, 23, count - 1)
    struct.pack_into(">i", changed, 57, count)
    return sealed(changed)


_RECORDS: Final = [Record(n, 1000 + n, 0, b"k%d" % n, b"v" * 20, ((b"h", b"x"),)) for n in range(3)]
_GOOD: Final = encode_reference(_RECORDS)
_MIB: Final = 1024 * 1024
BATCH_HEAD: Final = 61
"""Bytes of a batch before its records."""


@functools.cache
def batches() -> tuple[bytes, ...]:
    """Return valid batches, then those of C.6.4 and C.6.5."""
    return (
        _GOOD,
        *(encode_reference(_RECORDS, codec=codec) for codec in Codec),
        encode_reference(_RECORDS, producer_id=5, producer_epoch=0, base_sequence=0),
        encode_reference(
            _RECORDS, producer_id=5, producer_epoch=0, base_sequence=0, transactional=True
        ),
        *_bad_headers(),
        *_bad_bodies(),
    )


def _bad_headers() -> tuple[bytes, ...]:
    return (
        b"",
        _GOOD[:60],
        _GOOD[:-1],
        _GOOD + _GOOD,
        b"\xff" * 100,
        *(_with(">i", 8, length) for length in (-1, 0, 48, 2**31 - 1)),
        *(_with(">b", 16, magic) for magic in (0, 1, 3, -1)),
        _GOOD[:-1] + b"\xff",
        *(_with(">H", 21, 1 << bit) for bit in range(16)),
        *(_with(">i", 23, delta) for delta in (-1, 0, 3, 2**31 - 1)),
        *(_with(">i", 57, count) for count in (-1, 0, 2, 4, 2**31 - 1)),
        *(_with(">q", 0, offset) for offset in (-1, 2**63 - 1)),
        *(_with(">q", at, time) for at in (27, 35) for time in (-1, -(2**63), 2**63 - 1)),
        _with(">q", 43, 2**63 - 1),
        *(_with(">h", 51, epoch) for epoch in (0, 2**15 - 1)),
        *(_with(">i", 53, sequence) for sequence in (0, 2**31 - 1)),
    )


def _bad_bodies() -> tuple[bytes, ...]:
    # A record: length, attributes, timestamp delta, offset delta, key, value, header count.
    odd = (
        b"\x0c\x00\x00\x00\x01\x01\x00",
        b"\x01" * 20,
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" * 3,
        b"\x1e\x00" + b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01" + b"\x00\x01\x01\x00",
        b"\x0e\x00\x00\x00\x01\x01\xfe\xff\xff\xff\x0f",
        b"\x0c\x00\x00\x00\xff\xff\xff\xff\x0f\x01\x00",
        b"",
    )
    return (
        *(_around(body, codec=codec) for body in odd for codec in range(8)),
        *(
            _around(compress(codec, bytes(66 * _MIB)), codec=codec)
            for codec in (Codec.GZIP, Codec.ZSTD)
        ),
        _around(compress(Codec.GZIP, b"") * 2000, codec=1),
        _around(compress(Codec.GZIP, compress(Codec.GZIP, bytes(_MIB))), codec=1),
        _around(b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, 2**31 - 1) + b"x", codec=2),
        _around(b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, -1) + b"x", codec=2),
        _around(b"\xff\xff\xff\xff\x0f" + b"\xfe" * 50, codec=2),
        _around(bytes.fromhex("04224d186c70ffffffffffffff7f00"), codec=3),
        _around(bytes.fromhex("28b52ffd") + b"\xe0" + b"\xff" * 8 + bytes(9), codec=4),
        _around(bytes.fromhex("28b52ffd00f8") + bytes(9), codec=4),
    )


SASL_TOKENS: Final = (
    b"",
    b"\0",
    b"\0\0",
    b"\0alice\0wrong",
    b"bob\0alice\0wrong",
    b"\xff\0a\0b",
    b"n,,n=alice,r=abc",
    b"n,,n=a=2Cb=3D,r=abc",
    b"n,,n=a=2,r=abc",
    b"y,,n=alice,r=abc",
    b"p=tls-unique,,n=alice,r=abc",
    b"n,a=bob,n=alice,r=abc",
    b"n,,n=" + b"a" * 4000 + b",r=abc",
    b"n,,m=x,n=alice,r=abc",
    b"n,,n=alice,r=abc,i=1000000000",
    b"c=biws,r=abc,p=AAAA",
    b"c=biws,r=abc,p=" + b"A" * 200,
    b"n,,n=\xd0\x96,r=abc",
)
"""C.6.7."""

MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "", "x" * 300)


class Words:
    """Values for the fields of requests: usual ones, those of the dictionary, those of responses.

    Most values are usual, or what a response had, so that requests get past the first check.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._seen: dict[str, list[object]] = {}

    def often(self, share: float = 0.75) -> bool:
        """Whether to take what is usual."""
        return self._chance.random() < share

    def remember(self, field: str, value: object) -> None:
        """Use a value of a response in later requests: a member ID, a producer ID, a topic ID."""
        kept = self._seen.setdefault(field, [])
        if value not in kept:
            kept.append(value)
            del kept[:-2]

    def _usual(self, field: str, kind: type[_T]) -> _T | None:
        """Return what a field of this name usually is; None if nothing is usual."""
        if not self.often():
            return None
        name = field.removeprefix("v3_and_below_").removesuffix("_or_member_epoch")
        known = self._seen.get(name) or _USUAL.get(name, ())
        found = [value for value in known if isinstance(value, kind)]
        return self._chance.choice(found) if found else None

    def text(self, field: str) -> str:
        """Return a text for a field of this name."""
        usual = self._usual(field, str)
        return self._chance.choice(NAMES) if usual is None else usual

    def uuid(self, field: str) -> uuid.UUID:
        """Return a topic ID."""
        usual = self._usual(field, uuid.UUID)
        return uuid.UUID(int=self._chance.randrange(4)) if usual is None else usual

    def integer(self, field: str, bits: int) -> int:
        """Return a number for a field of this name."""
        usual = self._usual(field, int)
        return self._chance.choice(INTEGERS[bits]) if usual is None else usual


_SETTING_NAMES: Final = tuple(name for name, _ in SETTINGS)
_VALUES: Final = tuple(value for _, value in SETTINGS)
_USUAL: Final[dict[str, tuple[object, ...]]] = {
    "acks": (-1, -1, 1, 0),
    "assignor": ("uniform", "range"),
    "broker_ids": (1,),
    "committed_leader_epoch": (-1, 0),
    "committed_metadata": ("",),
    "config_operation": (0, 1, 2, 3),
    "configuration_keys": _SETTING_NAMES,
    "coordinator_epoch": (0,),
    "coordinator_keys": (GROUP, TRANSACTIONAL_ID),
    "count": (2, 3),
    "current_leader_epoch": (-1, 0),
    "entity_name": QUOTA_NAMES,
    "entity_type": ENTITY_TYPES,
    "fetch_offset": (0, 1, 5),
    "generation_id": (1, 2, -1),
    "group_id": (GROUP,),
    "groups": (GROUP,),
    "groups_names": (GROUP,),
    "host": ("*", "10.0.0.1"),
    "index": (0,),
    "iterations": (4096,),
    "key": (*QUOTAS, GROUP),
    "key_type": (0, 1),
    "leader_epoch": (0,),
    "log_start_offset": (-1, 0),
    "match": QUOTA_NAMES,
    "match_type": (0, 1, 2),
    "max_bytes": (1_000_000, 100),
    "max_wait": (0, 1),
    "mechanism": (*MECHANISMS, 1, 2),
    "member_epoch": (0, 1, 2),
    "member_id": ("",),
    "min_bytes": (0, 1),
    "name": (TOPIC, TOPIC, "range", *_SETTING_NAMES),
    "num_partitions": (1, 2),
    "operation": (2, 3, 4),
    "partition": (0, 0, 1),
    "partition_index": (0, 0, 1),
    "partition_indexes": (0, 1),
    "partition_max_bytes": (1_000_000, 100),
    "partitions": (0, 1),
    "pattern_type_filter": (1, 2, 3),
    "permission_type": (2, 3),
    "principal": ("User:x", "User:*", "x"),
    "principal_filter": ("User:x",),
    "protocol_name": ("range",),
    "protocol_type": ("consumer",),
    "rebalance_timeout": (5, 1000),
    "replica_id": (-1,),
    "replication_factor": (1, -1),
    "resource_name": (TOPIC, "1", ""),
    "resource_pattern_type": (3,),
    "resource_type": (2, 2, 4),
    "server_assignor": ("uniform", "range"),
    "session_epoch": (-1, 0),
    "session_id": (0,),
    "session_timeout": (6000, 10_000),
    "subscribed_topic_names": (TOPIC,),
    "timestamp": (-1, -2, -3),
    "topic": (TOPIC,),
    "topic_names": ("other",),
    "topics": (TOPIC,),
    "transaction_timeout": (1000, 60_000),
    "transactional_id": (TRANSACTIONAL_ID,),
    "transactional_ids": (TRANSACTIONAL_ID,),
    "value": _VALUES,
}
"""By the name of a field, if no response had the field."""
