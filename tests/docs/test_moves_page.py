"""docs/moves.md: its commands, as they are on the page, move a partition."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

import pytest

from kit.judges.clients import rows_by_librdkafka
from kit.runs.page import Reader, commands
from kit.servers.apache import ApacheTools

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "moves.md").read_text()


@pytest.mark.slow
def test_the_commands_of_the_page_move_a_partition(tmp_path):
    reader = Reader(tmp_path, "127.0.0.1:9092", with_spark=False)
    reader.use(ApacheTools("4.3.1"))
    serve, produce, describe, plan, execute, verify = commands(PAGE)[:6]
    back, move_back, undo, cordon = commands(PAGE)[11:]
    first, second = f"{tmp_path}/disk-1", f"{tmp_path}/disk-2"
    os.environ["PWD"] = str(tmp_path)

    def places() -> dict[str, list[str]]:
        lines = reader.type(describe).splitlines()
        [found] = [json.loads(line) for line in lines if line.startswith("{")]
        [broker] = found["brokers"]
        return {
            one["logDir"]: [part["partition"] for part in one["partitions"]]
            for one in broker["logDirs"]
        }

    try:
        broker = reader.leave_running(serve, until=lambda text: "listening on" in text)
        reader.type(produce)
        assert places() == {first: ["orders-0"], second: []}
        reader.type(plan)
        reader.type(execute)
        deadline = time.monotonic() + 60
        while "completed successfully" not in (found := reader.type(verify)):
            assert time.monotonic() < deadline, found
        assert "Clearing broker-level throttles" in found
        assert places() == {first: [], second: ["orders-0"]}
        reader.type(back)
        assert f"it is in {first}" in reader.type(move_back)
        assert places() == {first: ["orders-0"], second: []}
        assert f"it is in {second}" in reader.type(undo)
        assert places() == {first: [], second: ["orders-0"]}
        assert "Completed updating config" in reader.type(cordon)
        address = next(
            word for word in broker.tail(10_000).split() if word.startswith("127.0.0.1:")
        )
        rows = list(rows_by_librdkafka(address, "orders"))
        assert [row.value for row in rows] == [b"%d" % n for n in range(1, 100_001)]
    finally:
        reader.end()


@pytest.mark.slow
def test_the_commands_of_the_page_move_a_partition_to_a_bucket(tmp_path, place):
    reader = Reader(tmp_path, "127.0.0.1:9093", with_spark=False)
    reader.use(ApacheTools("4.3.1"))
    serve, produce, plan, execute, describe = commands(PAGE)[6:11]

    def places() -> list[str]:
        lines = reader.type(describe).splitlines()
        [found] = [json.loads(line) for line in lines if line.startswith("{")]
        [broker] = found["brokers"]
        return [one["logDir"] for one in broker["logDirs"] if one["partitions"]]

    try:
        broker = reader.leave_running(serve, until=lambda text: "listening on" in text)
        reader.type(produce)
        assert places() == [f"{tmp_path}/hot"]
        reader.type(plan)
        reader.type(execute)
        deadline = time.monotonic() + 60
        while (found := places()) != [place.url]:
            assert time.monotonic() < deadline, found
        address = next(
            word for word in broker.tail(10_000).split() if word.startswith("127.0.0.1:")
        )
        rows = list(rows_by_librdkafka(address, "clicks"))
        assert [row.value for row in rows] == [b"%d" % n for n in range(1, 100_001)]
    finally:
        reader.end()
