"""The file of a plan: what Kafka's tool writes and reads, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.app.move_plan import Entry, plan_text, read_plan, write_new
from logmirror.errors import UsageError
from logmirror.model import TopicPartition

ONE = {"topic": "orders", "partition": 3, "replicas": [1, 2], "log_dirs": ["any", "/disk-2"]}


def test_the_plan_of_kafkas_tool_is_read():
    text = json.dumps({"version": 1, "partitions": [ONE]})
    entry = Entry(TopicPartition("orders", 3), (1, 2), ("any", "/disk-2"))
    assert read_plan(text) == [entry]
    assert json.loads(plan_text([entry])) == json.loads(text)

    without = {key: value for key, value in ONE.items() if key != "log_dirs"}
    [found] = read_plan(json.dumps({"partitions": [without]}))
    assert found.log_dirs == ("any", "any")


@given(
    st.dictionaries(
        st.builds(TopicPartition, st.text(min_size=1), st.integers(0, 2**31 - 1)),
        st.dictionaries(st.integers(0, 2**31 - 1), st.text(), min_size=1, max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_written_is_read(drawn):
    entries = [Entry(key, tuple(dirs), tuple(dirs.values())) for key, dirs in drawn.items()]
    assert read_plan(plan_text(entries)) == entries
    assert plan_text(entries).isascii()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "no version 1"),
        ({"version": 2, "partitions": [ONE]}, "no version 1"),
        ({"version": 1}, "no partitions"),
        ({"version": 1, "partitions": []}, "no partitions"),
        ({"partitions": [7]}, "not an object"),
        ({"partitions": [ONE | {"topic": ""}]}, "no topic or no number"),
        ({"partitions": [ONE | {"partition": True}]}, "no topic or no number"),
        ({"partitions": [ONE | {"partition": -1}]}, "no topic or no number"),
        ({"partitions": [ONE | {"replicas": []}]}, "no replicas"),
        ({"partitions": [ONE | {"replicas": ["1", "2"]}]}, "no replicas"),
        ({"partitions": [ONE | {"replicas": [1, 1]}]}, "do not match"),
        ({"partitions": [ONE | {"log_dirs": ["/a"]}]}, "do not match"),
        ({"partitions": [ONE | {"log_dirs": "/a"}]}, "not a list of texts"),
        ({"partitions": [ONE, ONE]}, "a partition twice"),
    ],
)
def test_what_is_no_plan_is_refused(content, problem):
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(UsageError, match=problem):
        read_plan(text)


def test_a_file_is_never_replaced(tmp_path):
    path = tmp_path / "plan.json"
    write_new(path, "first")
    with pytest.raises(FileExistsError):
        write_new(path, "second")
    assert path.read_text() == "first"
    with pytest.raises(UsageError, match="cannot write the plan"):
        write_new(tmp_path / "none" / "plan.json", "")
