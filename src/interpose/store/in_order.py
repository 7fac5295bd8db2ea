"""A thread that writes while another one computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Queue
from typing import Any

from interpose.errors import FileError


class InOrder:
    """A thread that does things in the order in which they are given; after one has failed, none."""

    def __init__(self) -> None:
        self._todo: Queue[tuple[Callable[[], Any], ...] | None] = Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="interpose-store", daemon=True)
        self._thread.start()

    def do(
        self,
        work: Callable[[], Any],
        *,
        otherwise: Callable[[], Any],
        finally_: Callable[[], Any] = int,
    ) -> None:
        """Give it something to do, and what to do if that or anything before it failed."""
        self._todo.put((work, otherwise, finally_))

    def check(self) -> None:
        """Raise what went wrong there, if anything did."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Until all is done."""
        self._todo.join()
        self.check()

    def end(self, *, wait: bool) -> None:
        """Do no more than what was given; or, without waiting, than what has begun."""
        if not wait and self._error is None:
            self._error = FileError("the harvest was ended.")
        self._todo.put(None)
        self._thread.join()
        if wait:
            self.check()

    def _work(self) -> None:
        while (given := self._todo.get()) is not None:
            work, otherwise, finally_ = given
            try:
                otherwise() if self._error is not None else work()
            except BaseException as error:
                self._error = error
                with suppress(OSError):
                    otherwise()
            finally:
                finally_()
                self._todo.task_done()
