"""Python's cycle collector, kept off what an engine has no part in.

A full collection goes through every object that importing PyTorch created, 0.1 s, while the GPU idles. What is there
when an engine begins to run is set aside (`gc.freeze`), so that collections look at what came since, and is given back
at the end. Both are a few pointers' work.

Setting aside has a price: Python forgets how much came since its last collections. In a loop of short runs, each of
which begins with it, no full collection would ever come. So short runs set nothing aside once PERIOD_S have gone by
without one, until Python has made it: what dies in cycles stays that much longer at most. What is there when a long run
begins, and dies in cycles meanwhile, stays until its end.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

PERIOD_S = 10.0


class Collector:
    """The collector of a process, for all its engines and threads: the first to run sets aside, the last gives back.

    What the user froze before is the user's: then nothing is done. What is frozen meanwhile is given back with ours,
    and `gc.collect` finds only cycles that came since.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # a collection that is asked for within may run anything
        self._users = 0
        self._frozen = False  # by us
        self._collections = -1  # full ones, when we last gave back
        self._period_ends = self._counts_from = 0.0  # by time.monotonic

    @contextmanager
    def aside(self, for_long: bool = False) -> Iterator[None]:
        """What is there now is set aside until the end. for_long: this is no part of a loop of short runs."""
        with self._lock:
            self._users += 1
            first = self._users == 1 or for_long
            if first and not self._frozen and self._may_freeze(for_long):
                if for_long:
                    gc.collect()  # what is dead already would stay as long
                gc.freeze()
                self._frozen = True
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._frozen:
                    gc.unfreeze()
                    self._frozen = False
                    self._collections = _full_collections()

    def _may_freeze(self, for_long: bool) -> bool:
        now = time.monotonic()
        if self._collections != _full_collections():  # Python made one that went through everything
            self._collections, self._period_ends = _full_collections(), now + PERIOD_S
        if (now >= self._period_ends and not for_long) or now < self._counts_from:
            return False
        if gc.get_freeze_count() > 0:
            self._counts_from = now + PERIOD_S  # counting what is frozen takes 10 ms and more
            return False
        return True


def _full_collections() -> int:
    found: int = gc.get_stats()[-1]["collections"]
    return found


COLLECTOR = Collector()
