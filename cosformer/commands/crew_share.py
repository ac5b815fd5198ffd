"""Trials over the processes that torchrun has started: each trial is taken by one of them."""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from cosformer.training import met

LOOK = 0.5
"""Seconds between two looks at what the other processes have done."""
SOON = timedelta(seconds=600)
"""The time within which all processes must have begun."""


class Share:
    """The trials of one process, which takes all of them; `Taken` is for one process of many."""

    is_first, neighbours = True, 1
    """Whether this process writes the rows; how many of the processes are on this machine."""

    def takes(self, name: str) -> bool:
        """Whether this process runs the trial; if so, no other process will."""
        return True

    def after_first(self, work: Callable[[], None]) -> None:
        """Do the work in the first process, while the others wait."""
        work()

    def failures(self, own: dict[str, str]) -> dict[str, str]:
        """Trial -> why it failed; on the first process of all processes, once all have ended."""
        return own


class Taken(Share):
    """The trials that one process of many takes: each trial is taken by one process."""

    def __init__(self, store: Store, rank: int, count: int) -> None:
        self._store, self.rank, self.count = PrefixStore("trials", store), rank, count
        self.is_first = rank == 0
        self.neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        self._own: set[str] = set()
        self._others: set[str] = set()

    def takes(self, name: str) -> bool:
        if name not in self._own | self._others:
            is_own = self._store.add(f"taken/{name}", 1) == 1
            (self._own if is_own else self._others).add(name)
        return name in self._own

    def after_first(self, work: Callable[[], None]) -> None:
        if self.is_first:
            work()
            self._store.set("ready", "")
        self._wait("ready")

    def failures(self, own: dict[str, str]) -> dict[str, str]:
        self._store.set(f"ended/{self.rank}", json.dumps(own))
        found = dict(own)
        for rank in range(self.count if self.is_first else 0):
            self._wait(f"ended/{rank}")
            found |= json.loads(self._store.get(f"ended/{rank}"))
        return found

    def _wait(self, key: str) -> None:
        """Until somebody has set it: for hours, if it must be; torchrun ends who waits in vain."""
        while not self._store.check([key]):
            time.sleep(LOOK)


def shared() -> Share:
    """Among the processes that torchrun has started, or alone."""
    found = met(SOON)
    return Share() if found is None else Taken(*found)
