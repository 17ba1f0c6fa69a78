"""Other ranks of torch.distributed as peers that take and bring bytes. No object is ever pickled on the way."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, Queue

import numpy as np
import torch
import torch.distributed as dist

from fcl_bench.engine.blob import LONGEST_HEADER
from fcl_bench.engine.remote.transport import AHEAD, Gone, Peer
from fcl_bench.errors import first_line

#: The length that tells a peer that nothing more will come.
_END = 0
#: The reason why a process that was killed no longer answers.
CLOSED = "its connection closed"


class RankPeer(Peer):
    """Another rank.

    A thread reads what it sends, before anybody asks for it: so a rank computes on while up to `AHEAD` uploads wait
    here. And waiting for it can be interrupted, which a wait in torch's own code cannot.
    """

    def __init__(self, rank: int, name: str, most: int = LONGEST_HEADER) -> None:
        super().__init__(name)
        self.most = most
        #: Whether it has said that nothing more will come.
        self.ended = False
        self._rank = rank
        self._inbox: Queue[torch.Tensor | str] = Queue(AHEAD)
        self._gone, self._leaving = "", False
        self._thread = threading.Thread(target=self._read, name=f"reads {name}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while True:
                length = torch.zeros(1, dtype=torch.int64)
                dist.recv(length, self._rank)
                if int(length) == _END:
                    self.ended = True
                    self._inbox.put("it has come to its end")
                    return
                if not 0 < int(length) <= self.most:
                    raise ValueError(f"it announces {int(length)} bytes, where at most {self.most} are expected")
                body = torch.empty(int(length), dtype=torch.uint8)
                dist.recv(body, self._rank)
                if not self._leaving:
                    self._inbox.put(body)
        except (RuntimeError, ValueError) as error:
            self._inbox.put(_reason(error))

    def send(self, blob: bytes) -> None:
        try:
            dist.send(torch.tensor([len(blob)]), self._rank)
            # A view: torch would warn of memory that it may not write to.
            dist.send(torch.from_numpy(np.frombuffer(bytearray(blob), dtype=np.uint8)), self._rank)
        except RuntimeError as error:
            raise Gone(_reason(error)) from error

    def ready(self) -> bool:
        """Whether `receive` returns, or raises `Gone`, at once."""
        return bool(self._gone) or not self._inbox.empty()

    def receive(self, seconds: float | None = None) -> memoryview:
        """The next message. Raises `Gone` if none will come, or none has come in time."""
        if self._gone:
            raise Gone(self._gone)
        try:
            body = self._inbox.get(timeout=seconds)
        except Empty:
            raise Gone("it does not answer") from None
        if isinstance(body, str):
            self._gone = body
            raise Gone(body)
        return body.numpy().data

    def end(self) -> None:
        """Say that nothing more will come. Whether the peer is there still does not matter."""
        with suppress(RuntimeError):
            dist.send(torch.tensor([_END]), self._rank)

    def await_end(self, seconds: float) -> None:
        """Wait until the peer has said so, too, so that its connection may be closed; what else it says is dropped."""
        self._leaving = True
        with suppress(Empty):  # the thread may wait for room
            while True:
                self._inbox.get_nowait()
        self._thread.join(seconds)


def _reason(error: Exception) -> str:
    """The words of torch's own that tell a user something: [file:line] and addresses are left out."""
    text = first_line(error)
    return CLOSED if "closed by peer" in text or "reset" in text else text
