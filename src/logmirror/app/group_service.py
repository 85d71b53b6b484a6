"""The groups of a configuration, beside the mirrors or alone (`logmirror run --only groups`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from logmirror.app.components import COMMAND_BUDGET_MS, Clients
from logmirror.app.specs import link_specs
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import UsageError
from logmirror.groups.service import GroupService
from logmirror.mirror.observer import Observer
from logmirror.monitoring.metrics import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.config.environment import ProcessEnvironment
    from logmirror.config.settings import Settings
    from logmirror.groups.link import Link
    from logmirror.groups.link_spec import LinkSpec
    from logmirror.stopping import StopRequest


def _service(settings: Settings, recorder: Recorder) -> GroupService | None:
    specs = link_specs(settings)
    return GroupService(specs, _open_link, SYSTEM_CLOCK, recorder) if specs else None


@contextlib.contextmanager
def groups_beside(settings: Settings, recorder: Recorder, *, once: bool) -> Iterator[None]:
    """Translate the groups while the block runs, or once after it."""
    service = _service(settings, recorder)
    if service is None:
        yield
    elif once:
        yield
        service.run_once()
    else:
        with service.running():
            yield


@contextlib.contextmanager
def _open_link(spec: LinkSpec) -> Iterator[Link]:
    from logmirror.groups.link import Link  # noqa: PLC0415  # loads kernels, only if it is used

    clients = Clients(COMMAND_BUDGET_MS)
    try:
        link = Link(spec, clients(spec.source), clients(spec.target), SYSTEM_CLOCK)
        with contextlib.closing(link):
            yield link
    finally:
        clients.close()


def run_groups(
    settings: Settings,
    *,
    until_now: bool,
    environment: ProcessEnvironment,
    request: StopRequest,
) -> None:
    """Translate groups until `request`, and replicate nothing; see `logmirror.run`."""
    from logmirror.monitoring.exposition import Shown  # noqa: PLC0415  # only commands that serve
    from logmirror.monitoring.http import serve  # noqa: PLC0415  # as above

    recorder = Recorder()
    service = _service(settings, recorder)
    if service is None:
        raise UsageError("no enabled mirror has `groups`", hint="add `groups` to a mirror")
    if until_now:
        service.run_once()
        return
    board = Observer([], recorder, SYSTEM_CLOCK).board
    board.lanes_begin([])
    with (
        serve(
            environment.metrics_port,
            recorder,
            board,
            Shown(partitions=False, mirror_v3_names=False),
            host=environment.metrics_host,
            is_required=environment.metrics_port_is_set,
        ),
        request.on_stop(service.stop),
    ):
        service.run()
