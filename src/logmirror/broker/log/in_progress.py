"""Work that is done once for all threads that ask for it at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_Result = TypeVar("_Result")


class InProgress(Generic[_Result]):
    """The runs in progress, by key. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[Hashable, Future[_Result]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._runs

    def run(self, key: Hashable, work: Callable[[], _Result]) -> _Result:
        """Run `work`, or wait for the run in progress with this key. Blocks.

        A run may begin just after another one has ended: `work` finds out whether it is needed.

        Returns:
            The result of that run. Raises as it does.
        """
        with self._lock:
            other = self._runs.get(key)
            if other is None:
                mine = self._runs[key] = Future[_Result]()
        if other is not None:
            return other.result()
        try:
            result = work()
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(result)
            return result
        finally:
            with self._lock:
                del self._runs[key]
