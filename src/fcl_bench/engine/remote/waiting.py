"""Replies that are there before their turn to be absorbed: how many may wait, and this process's own among them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.remote.replies import deserialise, deserialise_reply, serialise_reply

#: Bytes of one process's replies that may wait in the server's process; a single larger reply may, too.
MOST = 128 * 2**20
#: Bytes of all processes' replies together.
MOST_IN_ALL = 2**30


def share_of(processes: int) -> int:
    """Bytes of one process's replies that may wait where so many processes have clients."""
    return min(MOST, MOST_IN_ALL // processes)


class Room:
    """Keeps the bytes that wait below a bound: who brings more waits until some have been taken away.

    Args:
        most: the bound. Whatever its size, something has room where nothing else waits.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._used, self._unbounded = most, 0, False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Wait for room for `size` bytes, and use it."""
        with self._changed:
            self._changed.wait_for(lambda: self._unbounded or not self._used or self._used + size <= self._most)
            self._used += size

    def give_back(self, size: int) -> None:
        """The bytes no longer wait."""
        with self._changed:
            self._used -= size
            self._changed.notify()

    def unbind(self) -> None:
        """From now on everything has room."""
        with self._changed:
            self._unbounded = True
            self._changed.notify()


class OwnTurns:
    """The turns of this process's clients in a round, in client order; some may be done before they are due.

    Args:
        replies: does a turn when it is asked for the next reply.
        most: as in `Room`.
    """

    def __init__(self, replies: Iterator[Reply], most: int = MOST) -> None:
        self._replies, self._most = replies, most
        self._waiting: deque[bytes] = deque()
        self._bytes = self._largest = 0

    def work_ahead(self) -> bool:
        """Do the next turn now; returns False if there is none, or no room for its reply."""
        if self._waiting and self._bytes + self._largest > self._most:
            return False
        if (reply := next(self._replies, None)) is None:
            return False
        # As bytes, like another process's reply: the next turn may use the memory of this one's upload.
        blob = serialise_reply(reply)
        self._waiting.append(blob)
        self._bytes += len(blob)
        self._largest = max(self._largest, len(blob))
        return True

    def next(self) -> Reply:
        """The reply that is due."""
        if not self._waiting:
            return next(self._replies)
        blob = self._waiting.popleft()
        self._bytes -= len(blob)
        return deserialise_reply(deserialise(blob))
