"""`logmirror compact` in files and in a bucket: the archive is exact before, during and after.

Method: archives of many small objects are compacted by processes that crash at every failpoint and
at random times, while a mirror writes and a reader reads by the rule of docs/compact.md. The result
is read by programs that share no code with the product, and compared with the source.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import duckdb
import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source, archive_rows, object_names
from kit.runs.commands import FORMATS, logmirror, logmirror_json, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, run_now
from kit.runs.inline_server import ForkedProcess
from kit.runs.writer import writing
from kit.servers.s3 import S3Server
from kit.tiers import KILLS as ALL_KILLS
from kit.tiers import NIGHTLY
from logmirror.failpoints import POINTS as ALL_POINTS
from logmirror.failpoints import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.xdist_group("e2e-s3"), pytest.mark.timeout(900)]

POINTS = [p for p in ALL_POINTS if p.startswith("compact.")]
KILLS = max(ALL_KILLS // 5, 2)
SMALL = ("--min-objects", "2")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compact.md").read_text()
(RULE,) = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


class Filled(NamedTuple):
    """Archives of one topic in small objects, in files and in a bucket, in all formats."""

    config: Path
    source: Source
    roots: dict[str, Path]
    """Where objects are files, by kind of store."""

    def alone(self, where: str, form: str, folder: Path) -> Path:
        """A configuration of one of them."""
        content = json.loads(self.config.read_text())
        content["mirrors"] = [m for m in content["mirrors"] if m["name"] == f"{form}-{where}"]
        path = folder / "alone.json"
        path.write_text(json.dumps(content))
        return path


@pytest.fixture(scope="module")
def filled(cli_broker, server, tmp_path_factory) -> Filled:
    folder = tmp_path_factory.mktemp("compact")
    cli_broker.create_topic("compact", partitions=1)
    config = {"batch.num.messages": 10, "linger.ms": 5}
    produce(cli_broker.bootstrap, "compact", odd_messages(330, seed=4), config=config)
    bucket = server.new_bucket()
    mirrors = [
        mirror(
            "compact",
            cli_broker.bootstrap,
            "",
            form=form,
            name=f"{form}-{destination['type']}",
            destinations=[destination | {"name": form}],
            max_offsets=12,
        )
        for form in FORMATS
        for destination in (
            {"type": "filesystem", "root": str(folder / "files")},
            server.destination(bucket),
        )
    ]
    config = write_config(folder / "config.json", *mirrors)
    result = run_now(config)
    assert result.returncode == 0, result.stderr
    roots = {"filesystem": folder / "files", "s3": server.files(bucket)}
    return Filled(config, Source(cli_broker.bootstrap, "compact"), roots)


def die_at(point: str, config: Path, folder: Path) -> None:
    process = ForkedProcess(
        ["compact", "-c", str(config), *SMALL, "--target-bytes", "64KiB"],
        stdout=folder / "out",
        stderr=folder / "err",
        environment={**os.environ, VARIABLE: point},
    )
    wait_until(lambda: not process.alive, what=(folder / "err").read_text, timeout_s=120)
    assert process.end() == -signal.SIGKILL, (folder / "err").read_text()


def names_that_count(folder: Path) -> list[str]:
    query = RULE.replace("archive/lake/0/*.parquet", f"{folder}/*")
    return [Path(found).name for (found,) in duckdb.connect().execute(query).fetchall()]


def rows_that_count(folder: Path, form: str, copy: Path) -> list:
    """What a reader by the rule reads, from a folder in which nothing else lies."""
    copy.mkdir()
    for name in names_that_count(folder):
        (copy / name).symlink_to(folder / name)
    return archive_rows(copy, form, topic="compact", partition=0)


@pytest.mark.gate("a process per failpoint; the simulation has them all")
@pytest.mark.parametrize(
    ("where", "form"),
    [(where, form) for where in ("filesystem", "s3") for form in FORMATS]
    if NIGHTLY
    else [("filesystem", "native"), ("s3", "parquet"), ("filesystem", "ndjson")],
)
def test_a_crash_at_every_failpoint_stays_readable_and_the_next_run_finishes(
    filled, tmp_path, where, form
):
    truth, folder = filled.source.rows(0), filled.roots[where] / form / "0"
    config, before = filled.alone(where, form, tmp_path), len(object_names(folder))
    for point in (*POINTS, "compact.deleted#3"):
        die_at(point, config, tmp_path)
        names = object_names(folder)
        assert rows_that_count(folder, form, tmp_path / point) == truth, point
        shows = point.partition("#")[0] in {"compact.published", "compact.proven", POINTS[-1]}
        assert (names != names_that_count(folder)) == shows, point
    (report,) = logmirror_json("verify", "-c", config)
    assert not report["problems"]
    ((first, last),) = report["unfinished_compactions"]
    text = logmirror("verify", "-c", config).stdout
    assert f"compaction of {first}..{last} unfinished: run `logmirror compact`" in text
    (status,) = logmirror_json("status", "-c", config)
    assert status["lag"] == 0

    (done,) = logmirror_json("compact", "-c", config, *SMALL)

    left = object_names(folder)
    assert len(left) == done["objects_after"] < before / 3
    assert filled.source.anomalies(filled.roots[where], form) == []
    proof = logmirror("verify", "--deep", "--against-source", "-c", config)
    assert proof.returncode == 0, proof.stdout
    (again,) = logmirror_json("compact", "-c", config, *SMALL)
    assert (again["merged"], again["finished"], object_names(folder)) == (0, 0, left)


@pytest.mark.thinned
@pytest.mark.parametrize("where", ["files", "bucket"])
def test_compact_is_killed_while_a_mirror_writes_and_a_reader_reads(
    cli_broker, server, tmp_path, where
):
    topic = f"compact-kills-{where}"
    cli_broker.create_topic(topic, partitions=1)
    chooser, bucket = random.Random(where), server.new_bucket()
    root = tmp_path / "files" if where == "files" else server.files(bucket)
    destinations = {
        "files": {"type": "filesystem", "root": str(root), "name": "parquet"},
        "bucket": server.destination(bucket, name="parquet"),
    }
    one = mirror(
        topic, cli_broker.bootstrap, "", destinations=[destinations[where]], max_time_ms=20
    )
    config = write_config(tmp_path / "config.json", one)
    folder, source = root / "parquet" / "0", Source(cli_broker.bootstrap, topic)
    reader = Reader(folder)
    with (
        writing(cli_broker.bootstrap, topic, partitions=1, seed=5),
        InlineRun(config, folder=tmp_path) as run,
    ):
        wait_until(lambda: len(object_names(folder)) > 20, what=lambda: run.text, timeout_s=60)
        with reader:
            for _ in range(KILLS):
                compact = ForkedProcess(
                    ["compact", "-c", str(config), *SMALL],
                    stdout=tmp_path / "out",
                    stderr=tmp_path / "err",
                    environment=dict(os.environ),
                )
                time.sleep(chooser.uniform(0.05, 0.5))
                code = compact.end(kill=True)
                assert code in (0, -signal.SIGKILL), (tmp_path / "err").read_text()
            whole = logmirror("compact", "-c", config, *SMALL)
            assert whole.returncode == 0, whole.stdout + whole.stderr
            wait_until(lambda: reader.looks > 3, what=lambda: "a reader that continues")
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text
    result = run_now(config)

    assert result.returncode == 0, result.stderr
    whole = logmirror("compact", "-c", config, *SMALL)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert source.anomalies(root, "parquet") == []
    proof = logmirror("verify", "--deep", "--against-source", "-c", config)
    assert proof.returncode == 0, proof.stdout


class Reader:
    """Reads an archive over and over by the rule of the page, and says what it saw wrong."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stop = folder, threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._wrong: list[object] = []
        self.looks = 0

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self._wrong, self._wrong

    def _read(self) -> None:
        seen = 0
        while not self._stop.wait(0.02):
            names = names_that_count(self._folder)
            firsts = [int(name[:20]) for name in names]
            nexts = [0, *(int(name[21:41]) + 1 for name in names)]
            if firsts != nexts[:-1]:
                continue  # the listing has missed what changed meanwhile
            try:
                found = duckdb.connect().execute(
                    'SELECT count(*), count(DISTINCT "offset"), max("offset") '
                    "FROM read_parquet($f)",
                    {"f": [str(self._folder / name) for name in names]},
                )
                count, distinct, last = found.fetchone()
            except duckdb.IOException:
                continue  # an object is gone
            if not count == distinct == last + 1 == nexts[-1] or last < seen:
                self._wrong.append((count, distinct, last, names))
            seen = last
            self.looks += 1


def test_damaged_and_foreign_objects_are_refused_with_exit_code_and_name(
    cli_broker, server, tmp_path
):
    cli_broker.create_topic("compact-damage", partitions=2)
    for partition in range(2):
        messages = odd_messages(100, seed=partition)
        produce(cli_broker.bootstrap, "compact-damage", messages, partition=partition)
    one = mirror("compact-damage", cli_broker.bootstrap, tmp_path, name="a", max_offsets=5)
    config = write_config(tmp_path / "config.json", one)
    assert run_now(config).returncode == 0
    folders = [tmp_path / "a" / str(n) for n in range(2)]
    victim = sorted(folders[0].iterdir())[3]
    data = bytearray(victim.read_bytes())
    data[200] ^= 1
    victim.write_bytes(data)
    before = object_names(folders[0])

    result = logmirror("compact", "-c", config, *SMALL, "--format", "json")

    assert result.returncode == 65, result.stdout
    broken, sound = json.loads(result.stdout)
    assert broken["error"]["kind"] == "corruption"
    assert victim.name in broken["error"]["message"]
    assert object_names(folders[0]) == before
    assert sound["merged"] > 0
    first = object_names(folders[1])[0]
    foreign = folders[1] / f"{1:020d}-{2:020d}.parquet"
    foreign.write_bytes((folders[1] / first).read_bytes())
    for command in ("compact", "verify"):
        result = logmirror(command, "-c", config)
        assert result.returncode == 65
        assert foreign.name in result.stdout
        assert "inside another one" in result.stdout
    result = run_now(config)
    assert result.returncode == 65, result.stderr


def test_a_dry_run_reports_and_changes_nothing(filled):
    files = filled.roots["filesystem"]
    listed = sorted(path for path in files.rglob("*") if path.is_file())

    rows = logmirror_json(
        "compact", "-c", filled.config, "--dry-run", "--mirror", "native-filesystem"
    )

    assert {row["destination"] for row in rows} == {"native"}
    assert sorted(path for path in files.rglob("*") if path.is_file()) == listed


@pytest.mark.parametrize("size", ["many", "1 TB", "-1", "1.5MiB", "MiB", "256mib"])
def test_an_invalid_size_is_a_usage_error(filled, size):
    result = logmirror("compact", "-c", filled.config, "--target-bytes", size)

    assert result.returncode == 2
    assert "256MiB" in result.stderr


def test_the_compact_page_works_as_written(cli_broker, tmp_path, monkeypatch):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^logmirror (\S+) -c archive.yaml(.*)$", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    config = Path("archive.yaml")
    text = text.replace("127.0.0.1:9092", cli_broker.bootstrap)
    text = text.replace("orders", "compact-page").replace("65536", "2000")
    config.write_text(text.replace("root: archive", f"root: {tmp_path / 'archive'}"))
    cli_broker.create_topic("compact-page", partitions=1)
    produce(cli_broker.bootstrap, "compact-page", odd_messages(600, seed=1))
    assert run_now(config.absolute()).returncode == 0
    before = len(object_names(Path("archive/lake/0")))

    for name, options in commands:
        result = logmirror(name, "-c", config.absolute(), *options.split())
        assert result.returncode == 0, f"{name}: {result.stdout}\n{result.stderr}"

    assert [name for name, _ in commands] == ["compact", "compact", "verify"]
    listed = [Path(found).name for (found,) in duckdb.connect().execute(RULE).fetchall()]
    assert listed == object_names(Path("archive/lake/0"))
    assert len(listed) < before / 2
    source = Source(cli_broker.bootstrap, "compact-page")
    assert source.anomalies(Path("archive"), "parquet", name="lake") == []
