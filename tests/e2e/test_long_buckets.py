"""A bucket with more objects than one listing shows: what is broken far before its end is found.

Method: a real S3 server, whose objects are files: 1,200 of them are made at once, one per offset.
They are empty, because names are the position, except for the last one, which `run` has written: it
is compared with the source. Then `status` and `run` read the bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import produce
from kit.judges.gaps import plain_messages
from kit.runs.commands import logmirror_json, mirror, write_config
from kit.runs.inline_run import run_now
from kit.servers.s3 import S3Server
from logmirror.app.status import status
from logmirror.archive.naming import PARQUET, format_name
from logmirror.config.settings import load
from logmirror.errors import CorruptionError
from logmirror.model import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(600)]

COUNT = 1200
MORE = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3-long")) as running:
        yield running


def object_name(first, last):
    return format_name(OffsetRange(first=first, last=last), PARQUET)


def test_status_and_run_find_what_is_broken_anywhere_in_a_long_chain(cli_broker, server, tmp_path):
    topic, bucket = cli_broker.create_topic("long-bucket"), server.new_bucket()
    produce(cli_broker.bootstrap, topic, plain_messages(COUNT, seed=1))
    lake = server.destination(bucket, name="lake")
    one = mirror(topic, cli_broker.bootstrap, "", destinations=[lake])
    last = write_config(tmp_path / "last.json", {**one, "chain-start": COUNT - 1})
    assert run_now(last).returncode == 0
    config = write_config(tmp_path / "config.json", one)
    folder = server.files(bucket) / "lake" / "0"
    assert [path.name for path in folder.iterdir()] == [object_name(COUNT - 1, COUNT - 1)]
    for offset in range(COUNT - 1):
        (folder / object_name(offset, offset)).touch()

    def findings():
        (row,) = status(load(config))
        return row.error, run_now(config)

    gone = folder / object_name(100, 100)
    for name, facts in (
        ("0notes.txt", "unknown object"),
        ("", "gap in the chain"),
    ):
        extra = folder / name
        extra.touch() if name else gone.unlink()
        error, ran = findings()
        assert isinstance(error, CorruptionError)
        assert facts in error.message
        assert (ran.returncode, facts in ran.stderr) == (65, True), ran.stderr
        if name:
            extra.unlink()
    gone.touch()
    produce(cli_broker.bootstrap, topic, plain_messages(MORE, seed=2))

    error, ran = findings()

    assert (error, ran.returncode) == (None, 0), ran.stderr
    (row,) = logmirror_json("status", "-c", config)
    assert (row["position"], row["lag"]) == (COUNT + MORE, 0)
