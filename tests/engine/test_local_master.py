"""Local master URLs: how many slots Spark starts with."""

import pytest

from logmirror.engine import local_master
from logmirror.engine.local_master import cpu_count, with_retries, with_slots
from logmirror.errors import UsageError


@pytest.mark.parametrize(
    ("master", "more", "expected"),
    [
        ("local", 2, "local[3]"),
        ("local[2]", 0, "local[2]"),
        ("local[2]", 3, "local[5]"),
        ("local[2,7]", 3, "local[5,7]"),
        ("local[*]", 0, "local[*]"),
        ("local-cluster[2,1,1024]", 3, "local-cluster[2,1,1024]"),
        ("spark://host:7077", 3, "spark://host:7077"),
        ("local[x]", 3, "local[x]"),  # an error of `with_retries`
    ],
)
def test_a_local_master_gets_more_slots_and_others_keep_theirs(master, more, expected):
    assert with_slots(master, more) == expected


def test_all_cores_are_counted_as_a_jvm_counts_them(monkeypatch):
    monkeypatch.setattr(local_master, "cpu_count", lambda: 6)
    assert with_slots("local[*]", 2) == "local[8]"
    assert with_slots("local[*,3]", 2) == "local[8,3]"


def test_this_machine_has_at_least_one_core():
    assert cpu_count() >= 1


def test_a_master_that_is_none_is_refused():
    with pytest.raises(UsageError, match="not a valid Spark master"):
        with_retries("local[x]")
