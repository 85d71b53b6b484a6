"""`status` opens its clients and stores once per thread, however many requests it makes.

Method: the resources of a query are read twice in one thread and once in another. What `status`
reports is shown in tests/e2e/test_status.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from logmirror.app.status import StatusQuery


def test_each_thread_opens_its_clients_and_stores_once():
    def opened() -> list[object]:
        return [query._resources, query._resources]  # noqa: SLF001  # nothing public counts them

    with StatusQuery([]) as query, ThreadPoolExecutor(1) as other:
        first, again = opened()
        theirs, theirs_again = other.submit(opened).result(timeout=60)

    assert first is again
    assert theirs is theirs_again
    assert first is not theirs
