"""`logmirror broker --log-dir s3://...`: the embedded broker on a bucket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from logmirror.app.bucket_location import bucket_location
from logmirror.broker.server import serve
from logmirror.clock import new_writer_id
from logmirror.errors import FencedError, UsageError
from logmirror.stores.opening import begin_writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.broker.options import BrokerOptions


def serve_bucket(
    options: BrokerOptions,
    work_dir: Path | None,
    on_ready: Callable[[str, int], None],
    on_standby: Callable[[], None] = lambda: None,
) -> None:
    """Run a broker whose log dir is in a bucket until SIGTERM or SIGINT.

    Args:
        options: The broker's settings, with `bucket`.
        work_dir: Where its working folder is; None: a temporary one.
        on_ready: As in `serve`.
        on_standby: As in `serve`.

    Raises:
        FencedError: Another broker took over the log dir.
        UsageError: The location is not one, the store replaces existing objects, or another broker
            uses the folder; or as in `serve`.
        UnavailableError: The bucket cannot be reached.
        CorruptionError: Objects of the bucket are damaged or missing.
    """
    with contextlib.ExitStack() as held:
        location = bucket_location("--log-dir", options.bucket, os.environ)
        store = begin_writing(location, new_writer_id(), held)
        folder = held.enter_context(_working_folder(work_dir))
        options = replace(options, log_dir=folder)
        try:
            serve(options, on_ready=on_ready, store=store, on_standby=on_standby)
        except FencedError as error:
            raise error.add_facts(log_dir=options.bucket) from error.__cause__


@contextlib.contextmanager
def _working_folder(work_dir: Path | None) -> Iterator[Path]:
    """Yield an empty folder, which is removed in the end."""
    if work_dir is None:
        with tempfile.TemporaryDirectory(prefix="logmirror-broker-") as temporary:
            yield Path(temporary) / "work"
        return
    folder = work_dir / "logmirror-work"
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(work_dir / "logmirror-work.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(
            "working directory is not writable", path=str(work_dir), cause=str(error)
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                "working directory is in use by another broker", path=str(work_dir)
            ) from error
        shutil.rmtree(folder, ignore_errors=True)
        try:
            yield folder
        finally:  # only with the lock
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
