"""The groups of a configuration, beside the mirrors or alone (`logmirror run --only groups`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from logmirror.app.components import COMMAND_BUDGET_MS, Clients
from logmirror.app.group_archives import archive_service
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
    from logmirror.groups.archive_service import ArchiveService
    from logmirror.groups.link import Link
    from logmirror.groups.link_spec import LinkSpec
    from logmirror.stopping import StopRequest


def _service(settings: Settings, recorder: Recorder) -> GroupService | None:
    specs = link_specs(settings)
    return GroupService(specs, _open_link, SYSTEM_CLOCK, recorder) if specs else None


@contextlib.contextmanager
def groups_beside(
    settings: Settings, recorder: Recorder, request: StopRequest, *, once: bool
) -> Iterator[None]:
    """Translate and archive the groups until a stop is requested, or once after the block."""
    service, archives = _service(settings, recorder), archive_service(settings, recorder)
    if once:
        yield
        _run_once(service, archives)
        return
    with contextlib.ExitStack() as stack:
        for each in (archives, service):
            if each is not None:
                stack.enter_context(each.running())
        for each in (archives, service):
            if each is not None:
                stack.enter_context(request.on_stop(each.stop))
                stack.callback(each.stop)  # of both, before the wait for one
        yield


def _run_once(service: GroupService | None, archives: ArchiveService | None) -> None:
    """Translate once, then archive once; an error of one does not keep the other from running."""
    with contextlib.ExitStack() as stack:
        if archives is not None:
            stack.callback(archives.run_once)
        if service is not None:
            service.run_once()


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
    """Translate and archive groups until `request`, and replicate nothing; see `logmirror.run`."""
    from logmirror.monitoring.exposition import Shown  # noqa: PLC0415  # only commands that serve
    from logmirror.monitoring.http import serve  # noqa: PLC0415  # as above

    recorder = Recorder()
    service, archives = _service(settings, recorder), archive_service(settings, recorder)
    if service is None and archives is None:
        raise UsageError("no enabled mirror has `groups`", hint="add `groups` to a mirror")
    if until_now:
        _run_once(service, archives)
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
        contextlib.ExitStack() as stack,
    ):
        if archives is not None:
            stack.enter_context(archives.running())
            stack.enter_context(request.on_stop(archives.stop))
        if service is not None:
            stack.enter_context(request.on_stop(service.stop))
            service.run()
        elif archives is not None:
            archives.wait()
