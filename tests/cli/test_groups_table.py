"""What `logmirror groups` prints about plans: a line for each partition, all text as it is."""

from __future__ import annotations

import pytest

from logmirror.cli.groups import _print_steps
from logmirror.reports import GroupPlan, GroupStep, NextRecord


def plan(record: NextRecord | None, group: str = "billing") -> GroupPlan:
    step = GroupStep(
        mirror="orders",
        topic="orders",
        partition=0,
        target_topic="orders-copy",
        source_offset=12,
        target_offset=10,
        current_offset=None,
        next_record=record,
    )
    return GroupPlan(
        group=group,
        destination="standby",
        cluster_id="abc",
        source_state="Empty",
        target_state="",
        steps=(step,),
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, " - "),
        (NextRecord(offset=None), " end of the replica "),
        (
            NextRecord(offset=11, timestamp_ms=1_700_000_000_001, key="order-17"),
            " 2023-11-14T22:13:20.001Z key=order-17 ",
        ),
        (NextRecord(offset=11, timestamp_ms=0, key=""), " 1970-01-01T00:00:00.000Z key= "),
        (NextRecord(offset=11, timestamp_ms=0), " 1970-01-01T00:00:00.000Z without key "),
        (NextRecord(offset=11, timestamp_ms=-1), " 1969-12-31T23:59:59.999Z without key "),
        (NextRecord(offset=11, timestamp_ms=2**63 - 1), f" {2**63 - 1} ms without key "),
        (NextRecord(offset=11, timestamp_ms=-(2**63)), f" {-(2**63)} ms without key "),
        (NextRecord(offset=11, timestamp_ms=0, key="[red]\x1b[31m"), "key=[red]\\u001b[31m "),
    ],
)
def test_the_next_record_is_one_cell_of_text(record, expected, capsys):
    _print_steps([plan(record)])

    _, line = capsys.readouterr().out.splitlines()
    assert expected in f"{line} "
    assert line.isprintable()


@pytest.mark.parametrize("group", ["[red]", "[/]", ":smile:"])
def test_a_name_is_printed_as_it_is(group, capsys):
    _print_steps([plan(None, group)])

    assert f"\n{group} " in capsys.readouterr().out
