"""Damage to an archive in memory, as by disks, people and other programs.

Each kind of damage takes the archive's files and returns the changed ones. Damage that changes
nothing (a zeroed page that was zero) is drawn again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

_PAGE_BYTES: Final = 512

Files = dict[str, bytes]


class Chain(NamedTuple):
    """One partition's archive."""

    objects: Files
    """By name, without folder."""

    claims: Files
    """By first offset, 20 digits."""


class Damage(NamedTuple):
    """The archive after the damage."""

    kind: str
    chain: Chain
    touched: frozenset[str]
    """Names of objects that are to be read to see it."""

    shows_in_names: bool
    """Whether the names alone must show it."""


def draw(chooser: random.Random, chain: Chain, foreign: Chain) -> Damage:
    """Draw one kind of damage, with equal probability, and its place.

    Args:
        chooser: Random choices.
        chain: An intact chain.
        foreign: The chain of another partition, with objects of the same format.
    """
    while True:
        found = chooser.choice(_KINDS)(chooser, chain, foreign)
        if (found.chain.objects, found.chain.claims) != (chain.objects, chain.claims):
            return found


def _object(chooser: random.Random, chain: Chain) -> str:
    return chooser.choice(sorted(name for name, data in chain.objects.items() if data))


def _changed(chain: Chain, kind: str, changes: Mapping[str, bytes]) -> Damage:
    objects = chain.objects | changes
    return Damage(kind, chain._replace(objects=objects), frozenset(changes), shows_in_names=False)


def _flipped(chooser: random.Random, data: bytes) -> bytes:
    at = chooser.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chooser.randrange(8)]) + data[at + 1 :]


def _zeroed(chooser: random.Random, data: bytes) -> bytes:
    at = chooser.randrange(len(data)) // _PAGE_BYTES * _PAGE_BYTES
    size = min(_PAGE_BYTES, len(data) - at)
    return data[:at] + bytes(size) + data[at + size :]


def _flip(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    name = _object(chooser, chain)
    return _changed(chain, "bit flip", {name: _flipped(chooser, chain.objects[name])})


def _cut(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    name = _object(chooser, chain)
    data = chain.objects[name]
    return _changed(chain, "truncation", {name: data[: chooser.randrange(len(data))]})


def _zero(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    name = _object(chooser, chain)
    return _changed(chain, "zeroed page", {name: _zeroed(chooser, chain.objects[name])})


def _swap(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    one, other = chooser.sample(sorted(chain.objects), 2)
    return _changed(chain, "swapped", {one: chain.objects[other], other: chain.objects[one]})


def _replace(chooser: random.Random, chain: Chain, foreign: Chain) -> Damage:
    name = _object(chooser, chain)
    return _changed(chain, "foreign content", {name: foreign.objects[_object(chooser, foreign)]})


def _rename(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    """Rename to another range or an invalid name; for the last object only contents show it."""
    names = sorted(chain.objects)
    at = chooser.randrange(len(names))
    first, last, extension = _parts(names[at])
    by = chooser.randrange(1, 9)
    new = chooser.choice(
        (
            _name(first + by, max(last, first + by), extension),
            _name(first, last + by, extension),
            f"{first}-{last}.{extension}",
            _name(first, last, f"{extension}2"),
            _name(first, last, extension).upper(),
        )
    )
    objects = {k: v for k, v in chain.objects.items() if k != names[at]}
    is_hidden = at == len(names) - 1 and new == _name(first, last + by, extension)
    damaged = chain._replace(objects=objects | {new: chain.objects[names[at]]})
    return Damage("wrong name", damaged, frozenset({new}), shows_in_names=not is_hidden)


def _move_border(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    """Rename two neighbours so that their names still fit."""
    names = sorted(chain.objects)
    at = chooser.randrange(len(names) - 1)
    (first, _, extension), (border, last, _) = _parts(names[at]), _parts(names[at + 1])
    moved = chooser.choice([o for o in (border - 1, border + 1) if first < o <= last])
    new = (_name(first, moved - 1, extension), _name(moved, last, extension))
    objects = {k: v for k, v in chain.objects.items() if k not in names[at : at + 2]}
    objects |= {new[0]: chain.objects[names[at]], new[1]: chain.objects[names[at + 1]]}
    damaged = chain._replace(objects=objects)
    return Damage("wrong names that fit", damaged, frozenset(new), shows_in_names=False)


def _lose(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    names = sorted(chain.objects)
    count = chooser.choice((1, 1, 1, 2, 3, len(names)))
    at = chooser.randrange(len(names) - count + 1)
    objects = {k: v for k, v in chain.objects.items() if k not in names[at : at + count]}
    return Damage("missing", chain._replace(objects=objects), frozenset(), shows_in_names=True)


def _overlap(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    """Add an object whose range others cover already, in whole or in part."""
    name = _object(chooser, chain)
    first, last, extension = _parts(name)
    by = chooser.randrange(1, 9)
    new = chooser.choice(
        (
            _name(first, last + by, extension),
            _name(first, max(first, last - 1), extension),
            _name(max(first - by, 0), last, extension),
            _name(last, last + by, extension),
        )
    )
    objects = chain.objects | {new: chain.objects[name]}
    if new in chain.objects:
        return Damage("overlap", chain, frozenset(), shows_in_names=True)
    return Damage("overlap", chain._replace(objects=objects), frozenset(), shows_in_names=True)


def _intrude(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    first, last, extension = _parts(_object(chooser, chain))
    other = chooser.choice([e for e in ("parquet", "ndjson", "batches") if e != extension])
    names = ("_SUCCESS", "notes.txt", _name(first, last, other), f"{first:020d}.log")
    objects = chain.objects | {chooser.choice(names): b"a foreign file"}
    return Damage("foreign file", chain._replace(objects=objects), frozenset(), shows_in_names=True)


def _claim(chooser: random.Random, chain: Chain, _foreign: Chain) -> Damage:
    first = chooser.choice(sorted(chain.claims))
    data = chain.claims[first]
    how: Callable[[], bytes] = chooser.choice(
        (
            lambda: _flipped(chooser, data),
            lambda: _zeroed(chooser, data),
            lambda: data[: chooser.randrange(len(data))],
            lambda: chain.claims[chooser.choice(sorted(chain.claims))],
        )
    )
    claims = chain.claims | {first: how()}
    touched = frozenset(name for name in chain.objects if name.startswith(first))
    return Damage("claim", chain._replace(claims=claims), touched, shows_in_names=False)


_KINDS: Final = (
    _flip,
    _flip,
    _cut,
    _zero,
    _swap,
    _replace,
    _rename,
    _move_border,
    _lose,
    _overlap,
    _intrude,
    _claim,
)


def _parts(name: str) -> tuple[int, int, str]:
    stem, _, extension = name.partition(".")
    first, last = stem.split("-")
    return int(first), int(last), extension


def _name(first: int, last: int, extension: str) -> str:
    return f"{first:020d}-{last:020d}.{extension}"
