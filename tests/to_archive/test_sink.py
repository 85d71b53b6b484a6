"""An object under construction that is discarded leaves nothing in the store or in memory."""

import gc
import weakref

import pytest

from logmirror.locations import FolderLocation
from logmirror.mirror.ports import ArchiveSpec, FlowId
from logmirror.stores.filesystem import FilesystemStore
from logmirror.to_archive.sink import ObjectWriter


@pytest.mark.parametrize("form", ["native", "parquet", "ndjson"])
def test_an_object_that_is_given_up_leaves_nothing_behind(tmp_path, form):
    spec = ArchiveSpec(
        location=FolderLocation(str(tmp_path)),
        format=form,
        extension=form,
        compression="zstd-1",
        encoding="base64",
        max_bytes=1000,
        max_offsets=1000,
        max_time_ms=1000,
    )
    flow = FlowId(mirror="m", destination="d", topic="t", partition=0)
    store = FilesystemStore(tmp_path, writer_id="w")
    writer = ObjectWriter(store, spec, flow, 0)
    still_there = weakref.ref(writer)

    writer.abort()
    del writer

    gc.collect()
    assert still_there() is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
