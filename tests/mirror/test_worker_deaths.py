"""A slice that kills its worker is found among the others, and the error names its range.

Method: works as the driver plans them; a runner that fails whenever the poisoned slice is among
them, as a Spark job does.
"""

import pytest

from kit.fakes.scripted import TOPIC_ID, archive_spec
from logmirror.errors import UnavailableError
from logmirror.mirror.ports import FlowId, Slice, Work
from logmirror.mirror.worker_deaths import WorkerDeaths

LOST = UnavailableError("the Spark job failed", reason="Python worker exited unexpectedly")


def work(partition, first=0, end=100, **fields):
    flow = FlowId(mirror="m", destination="d", topic="t", partition=partition)
    slice_ = Slice(
        flow=flow, topic_id=TOPIC_ID, compacted=False, first=first, end=end, tail=None, **fields
    )
    return Work(
        slice=slice_, source=None, destination=archive_spec(), writer_id="w", estimated_bytes=1
    )


def test_the_first_failure_names_no_range_and_the_second_does():
    deaths, poison = WorkerDeaths(), work(3, 400, 500)
    [first] = deaths.failed([poison], LOST).values()
    assert (first.message, first.facts["reason"]) == (LOST.message, LOST.facts["reason"])
    [second] = deaths.failed([poison], LOST).values()
    assert isinstance(second, UnavailableError)
    facts = second.facts
    assert (facts["topic"], facts["partition"], facts["failed_jobs"]) == ("t", 3, 2)
    assert (facts["first_offset"], facts["last_offset"]) == (400, 499)
    assert facts["reason"] == LOST.facts["reason"]
    assert "limits.max-batch-unpacked-bytes" in second.hint


def test_the_end_of_a_slice_may_grow_between_two_attempts():
    deaths = WorkerDeaths()
    deaths.failed([work(0, 400, 500)], LOST)
    [error] = deaths.failed([work(0, 400, 650)], LOST).values()
    assert (error.facts["first_offset"], error.facts["last_offset"]) == (400, 649)


def test_a_job_that_ends_clears_its_slices():
    deaths, one = WorkerDeaths(), work(0)
    deaths.failed([one], LOST)
    deaths.finished([one])
    [error] = deaths.failed([one], LOST).values()
    assert error.message == LOST.message


def test_several_slices_of_a_flow_are_one_range():
    deaths, parts = WorkerDeaths(), [work(0, 0, 100), work(0, 100, 200, staged=True)]
    deaths.failed(parts, LOST)
    [error] = deaths.failed(parts, LOST).values()
    assert (error.facts["first_offset"], error.facts["last_offset"]) == (0, 199)


@pytest.mark.parametrize("poisoned", [0, 2, 4])
def test_the_poisoned_slice_is_found_among_others_and_only_it_is_named(poisoned):
    """Each loop is a tick: a flow that failed backs off for one, as in the driver."""
    deaths, waiting, backs_off = WorkerDeaths(), {n: work(n) for n in range(5)}, set()
    named, jobs = {}, []
    for _ in range(12):
        planned = [one for n, one in waiting.items() if n not in backs_off]
        backs_off = set()
        if not planned:
            continue
        job = deaths.next_job(planned)
        partitions = [one.slice.flow.partition for one in job]
        jobs.append(partitions)
        if poisoned in partitions:
            backs_off = set(partitions)
            for flow, error in deaths.failed(job, LOST).items():
                if "first_offset" in error.facts:
                    named[flow.partition] = error
        else:
            deaths.finished(job)
            for partition in partitions:
                del waiting[partition]
    assert set(waiting) == set(named) == {poisoned}
    assert jobs[0] == [0, 1, 2, 3, 4]
    assert all(len(job) == 1 for job in jobs[1:]), "suspects run alone"


def test_works_without_suspects_run_together_and_suspects_do_not_stop_them_for_ever():
    deaths, works = WorkerDeaths(), [work(0), work(1)]
    assert deaths.next_job(works) == works
    deaths.failed([works[0]], LOST)
    assert deaths.next_job(works) == [works[0]]
    assert deaths.next_job([works[1]]) == [works[1]], "while the suspect backs off"
