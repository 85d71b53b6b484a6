"""Opens the log dir of a broker in a bucket: at once, or as a standby when its owner is gone."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from logmirror.broker.bucket.logs import BucketLogs
from logmirror.stopping import StopRequest, handle_signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from logmirror.broker.bucket.standby import Standby
    from logmirror.broker.options import BrokerOptions
    from logmirror.stores.base import BlobStore


def open_bucket(
    options: BrokerOptions, store: BlobStore, on_standby: Callable[[], None]
) -> BucketLogs | None:
    """Take the log dir over. None: it was a standby, and a stop was requested.

    Args:
        options: The broker's settings.
        store: The log dir.
        on_standby: Called before it waits.

    Raises:
        CorruptionError, UnavailableError, UsageError: As `BucketLogs` and `Standby.take_over`.
    """

    def open_logs(behind: int | None = None) -> BucketLogs:
        return BucketLogs(
            store,
            options.log_dir,
            interval_ms=options.commit_interval_ms,
            cache_bytes=options.cache_bytes,
            behind=behind,
        )

    if not options.standby:
        return open_logs()
    from logmirror.broker.bucket.standby import Standby  # noqa: PLC0415  # only a standby needs it

    stop = StopRequest()
    standby = Standby(store, options.standby_timeout_ms, stop, with_stdin=options.stop_with_stdin)
    is_main = threading.current_thread() is threading.main_thread()
    with (
        handle_signals(stop) if is_main else contextlib.nullcontext(),
        _monitored(options, standby),
    ):
        on_standby()
        return standby.take_over(open_logs)


def _monitored(options: BrokerOptions, standby: Standby) -> AbstractContextManager[object]:
    if not options.monitoring_port:
        return contextlib.nullcontext()
    from logmirror.broker.monitoring import NoValues, StandbyViews, endpoint_of  # noqa: PLC0415  # loads Prometheus's client

    return endpoint_of(options, NoValues(), StandbyViews(options.bucket, standby))
