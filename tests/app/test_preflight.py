"""`validate --check` refuses the positions that `run` refuses.

Method: an archive in memory of a scripted source whose log was truncated and written again, with
leader epochs. Its offsets alone show nothing: the new log is longer than the position.
"""

from __future__ import annotations

import pytest

from kit.fakes.scripted import Log, ScriptedClient, SteppingClock, archive_spec, batches, service
from logmirror.app import preflight
from logmirror.errors import PositionError
from logmirror.mirror.source_views import MirrorSpec
from logmirror.testing import MemoryStore


def test_a_source_with_a_second_history(monkeypatch):
    log, store = Log(batches(0, 10, leader_epoch=3), leader_epoch=3), MemoryStore()
    client, spec = ScriptedClient([log]), archive_spec()
    with service(client, store, spec=spec, clock=SteppingClock()) as (made, _):
        made.run(until_now=True)
    monkeypatch.setattr(preflight, "open_store", lambda _location, _writer: store)
    mirror = MirrorSpec(
        name="m",
        source="source",
        topic="t",
        partitions=None,
        destinations=(("d", spec),),
        chain_start=None,
    )

    def position_rows():
        origin = preflight._read_source(mirror, client)  # noqa: SLF001  # the rest needs a folder
        return list(preflight._check_positions(mirror, "d", spec, lambda _: client, origin))  # noqa: SLF001  # as above

    (row,) = position_rows()
    assert (row.severity, row.found) == ("ok", "1 partitions, 10 offsets replicated")

    log.batches[-1:] = batches(9, 14, leader_epoch=4)
    log.leader_epoch = 4
    with pytest.raises(PositionError) as caught:
        position_rows()
    assert caught.value.facts["reason"] == "SourceWentBackwards"
