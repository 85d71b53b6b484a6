"""A slot's share of memory decides the size of pieces and the number of parallel objects.

Method: sums over the values themselves, and slices that run with little and with much memory: the
results must be the same to every reader. The memory of a real process is measured in
tests/e2e/test_several.py.
"""

import io

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.fakes.scripted import TOPIC_ID, Log, ScriptedClient, archive_spec, batches, service
from logmirror.archive import envelope
from logmirror.config.scalars import MEMORY_BYTES_MIN
from logmirror.locations import FolderLocation, S3Location
from logmirror.mirror.ports import SLOT_BYTES, FlowId, Slice, Work
from logmirror.model import Trigger
from logmirror.source.partition import FETCH_BYTES, KafkaSource
from logmirror.stores import s3
from logmirror.testing import MemoryStore
from logmirror.to_archive.memory import SLOT_BYTES_MIN, Memory
from logmirror.to_archive.shared_read import carry_out
from logmirror.to_archive.transfer import Transfer
from logmirror.wire.decode import RecordDecoder

MIB = 1 << 20
FILES, BUCKET = FolderLocation("/archive"), S3Location(bucket="archive")
FORMATS = ["native", "parquet", "ndjson"]


def work_of(form="parquet", location=FILES, **spec):
    return Work(
        slice=Slice(
            flow=FlowId(mirror="m", destination="d", topic="t", partition=0),
            topic_id=TOPIC_ID,
            compacted=False,
            first=0,
            end=200,
            tail=Trigger.EXPLICIT,
        ),
        source=None,
        destination=archive_spec(format=form, location=location, **spec),
        writer_id="w",
        estimated_bytes=1,
    )


@given(
    share=st.integers(SLOT_BYTES_MIN, 2 << 30),
    form=st.sampled_from(FORMATS),
    location=st.sampled_from([FILES, BUCKET]),
)
def test_one_object_of_any_kind_fits_into_any_share(share, form, location):
    memory = Memory.of_share(share)
    one = memory.object_bytes(work_of(form, location).archive)
    assert FETCH_BYTES + 2 * memory.chunk_bytes + one <= share
    assert memory.waves([work_of(form, location)] * 2)[0]


@given(
    share=st.integers(SLOT_BYTES_MIN, 2 << 30),
    kinds=st.lists(
        st.tuples(st.sampled_from(FORMATS), st.sampled_from([FILES, BUCKET])), min_size=1
    ),
)
def test_waves_fit_and_hold_every_slice(share, kinds):
    memory, works = Memory.of_share(share), [work_of(*kind) for kind in kinds]
    waves = memory.waves(works)
    assert [work for wave in waves for work in wave] == works
    for wave in waves:
        assert sum(memory.object_bytes(work.archive) for work in wave) <= memory.objects_bytes


def test_without_a_budget_pieces_are_whole_and_three_destinations_are_written_side_by_side():
    memory = Memory.of_share(SLOT_BYTES)
    assert memory.row_group_bytes == envelope.ROW_GROUP_BYTES
    assert memory.held_bytes == s3.MEMORY_BYTES
    assert memory.chunk_bytes == 32 * MIB
    three = [work_of("native"), work_of("parquet"), work_of("parquet", BUCKET)]
    assert memory.waves(three) == [three]
    assert Memory.of_share(SLOT_BYTES_MIN).waves(three) == [three[:2], three[2:]]


def test_the_configuration_refuses_what_is_too_little_for_one_object():
    assert MEMORY_BYTES_MIN == SLOT_BYTES_MIN


@pytest.mark.parametrize("form", FORMATS)
def test_little_memory_changes_no_range_and_no_content(form):
    """Two writers with other budgets agree on every object (I2)."""
    log = Log(batches(0, 200, 7))
    left = []
    for row_group_bytes, chunk_bytes in ((1, 1), (500, 90), (None, 32 * MIB)):
        store, decoder = MemoryStore(), RecordDecoder(max_chunk_bytes=chunk_bytes)
        work = work_of(form, max_offsets=90, max_bytes=700)
        source = KafkaSource(ScriptedClient([log]), work.slice.flow.source, topic_id=TOPIC_ID)
        transfer = Transfer(work, store, decoder, row_group_bytes=row_group_bytes)
        (result,) = carry_out([transfer], source, decoder)
        assert result.error is None
        left.append([(r.covered, r.digest, r.trigger, r.payload_bytes) for r in result.receipts])
        if form == "parquet":
            groups = [
                pq.ParquetFile(io.BytesIO(data)).metadata.num_row_groups
                for name, data in store.objects.items()
                if name.endswith(".parquet")
            ]
            assert (max(groups) > 1) == (row_group_bytes is not None)
    assert left[0] == left[1] == left[2]
    assert len(left[0]) > 2


@pytest.mark.parametrize(("slots", "share"), [(1, 100 * MIB), (2, 50 * MIB), (3, 100 * MIB // 3)])
def test_slots_share_the_budget(slots, share):
    shares = set()
    client = ScriptedClient([Log(batches(0, 20))])
    with service(client, MemoryStore(), slots=slots, memory_bytes=100 * MIB) as (made, runner):
        run = runner.run

        def noting(works, *more):
            shares.update(work.memory_bytes for work in works)
            return run(works, *more)

        runner.run = noting
        made.run(until_now=True)
    assert shares == {share}
