"""Slices whose source has records that a mirror has copied from the destination.

Method: as in `test_preserve_transfer.py`.
"""

import pytest

from kit.fakes.scripted import Log, batches
from kit.fakes.scripted_copies import World, value
from logmirror.to_kafka.idempotence import marker_producer_id, producer_id

COPY_ID = bytes(range(16, 32))
"""The topic ID of the destination."""


def moved_by_another_writer(world, end):
    """The destination's log grows while the source is fetched."""
    fetch = world.source.fetch

    def fetched(*arguments, **options):
        world.destination.ends[0] = end
        return fetch(*arguments, **options)

    return fetched


@pytest.mark.parametrize("identity", [lambda data: data, marker_producer_id])
def test_records_that_came_from_the_destination_are_not_written_to_it_again(identity):
    written = identity(producer_id("t", 0, COPY_ID))
    world = World(Log(batches(0, 20) + batches(20, 30, producer_id=written)))
    world.destination.ends[0] = 20
    world.source.fetch = moved_by_another_writer(world, 30)

    (result,) = world.run(20, topic_id=COPY_ID)

    assert result.error.facts["reason"] == "RecordsReturn"
    assert (result.error.facts["expected"], result.error.facts["found"]) == (20, 30)
    assert (world.destination.requests, result.receipts) == ([], ())


def test_records_that_the_destination_has_lost_are_copied_back():
    written = producer_id("t", 0, COPY_ID)
    world = World(Log(batches(0, 30, producer_id=written)))
    world.destination.ends[0] = 20

    (result,) = world.run(20, topic_id=COPY_ID)

    assert world.destination.values() == [(n, value(n)) for n in range(20, 30)]
    assert result.error is None
