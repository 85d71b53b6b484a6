"""Which tests run when, and how large they are.

    make check    `check`    no JVM: what one runs while working
    make test     `test`     every promise and every judge once
    .ci/run       `test`, then `gate`: what `test` leaves out, and its thinned tests in full
    make nightly  `nightly`  everything: 50 kills of each kind, every cell of the fault matrix
    pytest        `all`      `test` and `gate` together

The environment variable `LOGMIRROR_TEST_TIER` selects the tier. Markers: `gate` for tests that only
the gate and the nights run, each with its reason; `thinned` for tests that run smaller in `test`,
not in `check`; `slow` for tests that `check` leaves out and all others run once; `jvm` for tests
that start a JVM where their fixtures do not show it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal, TypeVar, cast, get_args

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

Tier = Literal["check", "test", "gate", "all", "nightly"]

TIER: Final = cast("Tier", os.environ.get("LOGMIRROR_TEST_TIER", "all"))
if get_args(Tier).count(TIER) != 1:
    raise ValueError(f"LOGMIRROR_TEST_TIER must be one of {get_args(Tier)}, not {TIER!r}")
NIGHTLY: Final = TIER == "nightly"
IS_THIN: Final = TIER in {"check", "test"}

_JVM_FIXTURES: Final = frozenset(
    {"kafka_392", "kafka_431", "secure_kafka", "apache_kafka", "apache_tools"}
)
_JVM_FOLDERS: Final = frozenset({"e2e", "demo"})

_T = TypeVar("_T")


def sized(thin: _T, full: _T, nightly: _T) -> _T:
    """Return the size of a test that is marked `thinned`: in `test`, in the gate, at night."""
    return nightly if NIGHTLY else thin if IS_THIN else full


def all_but(values: Iterable[_T], *kept: _T, reason: str) -> list[object]:
    """Return parameters of which `make test` runs those that are kept, and the gate the others."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.gate(reason))
        for value in values
    ]


PLANTED: Final = pytest.mark.gate("planted faults, which a simulation must find")
"""Marks tests of the simulations themselves, which take more CPU time than the simulations."""

KILLS: Final = int(os.environ.get("LOGMIRROR_TEST_KILLS") or sized(2, 10, 50))
"""How often a test kills a process at random moments."""


def starts_a_jvm(item: pytest.Item) -> bool:
    """Whether a test needs Java: by its folder, its fixtures, its parameters or its marker."""
    return bool(
        _JVM_FOLDERS.intersection(item.path.parts)
        or _JVM_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        or any(name in item.nodeid for name in ("kafka_392", "kafka_431"))
        or item.get_closest_marker("jvm")
    )


def is_selected(item: pytest.Item) -> bool:
    """Whether a test belongs to the tier that runs."""
    is_of_the_gate = item.get_closest_marker("gate") is not None
    is_thinned = item.get_closest_marker("thinned") is not None
    if TIER == "check":
        is_slow = item.get_closest_marker("slow") is not None
        return not (is_of_the_gate or is_thinned or is_slow or starts_a_jvm(item))
    if TIER == "test":
        return not is_of_the_gate
    if TIER == "gate":
        return is_of_the_gate or is_thinned
    return True
