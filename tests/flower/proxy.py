"""A TCP proxy between a node and the SuperLink, which harms what passes: for tests, and for `benchmarks site_kills`."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from contextlib import suppress

#: What happens to a piece of what passes: nothing more of its connection passes; it waits; half of it passes, and then
#: nothing more; one of its bytes is another one.
KINDS = ("cut", "delay", "halve", "flip")
#: Bytes of a piece, at most; seconds that one waits.
_PIECE, _DELAYS = 1 << 16, (0.1, 5.0)


class Proxy:
    """Listens on a free port of 127.0.0.1, and passes everything on to another one.

    Args:
        port: of the SuperLink, on 127.0.0.1.
        rate: the share of pieces that are harmed.
        seed: of what is drawn: of each connection and direction, the same for the same pieces.
        kinds: of `KINDS`.

    Attributes:
        port: where it listens.
        up, down: what came from the node, and from the SuperLink, before it was harmed.
        done: how many pieces were harmed, by kind.
    """

    def __init__(self, port: int, rate: float = 0.0, seed: int = 0, kinds: tuple[str, ...] = KINDS) -> None:
        self._target, self.rate, self._seed, self._kinds = port, rate, seed, kinds
        self.up, self.down, self.done = bytearray(), bytearray(), dict.fromkeys(kinds, 0)
        self._lines: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                node, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                link = socket.create_connection(("127.0.0.1", self._target), timeout=10)
            except OSError:
                node.close()
                continue
            link.settimeout(None)
            self._lines |= {node, link}
            for passed, line, other in ((self.up, node, link), (self.down, link, node)):
                rng = random.Random(f"{self._seed}:{number}:{passed is self.up}")
                threading.Thread(target=self._pass, args=(line, other, passed, rng), daemon=True).start()

    def _pass(self, line: socket.socket, other: socket.socket, passed: bytearray, rng: random.Random) -> None:
        with suppress(OSError):
            while piece := line.recv(_PIECE):
                passed += piece
                kind = rng.choice(self._kinds) if rng.random() < self.rate else ""
                if kind:
                    self.done[kind] += 1
                if kind == "cut":
                    break
                other.sendall(self._harmed(piece, kind, rng))
                if kind == "halve":
                    break
        self._close(line, other)

    def _harmed(self, piece: bytes, kind: str, rng: random.Random) -> bytes:
        if kind == "delay":
            time.sleep(rng.uniform(*_DELAYS))
        if kind == "halve":
            return piece[: len(piece) // 2]
        if kind == "flip":
            place = rng.randrange(len(piece))
            return piece[:place] + bytes([piece[place] ^ rng.randrange(1, 256)]) + piece[place + 1 :]
        return piece

    def _close(self, *lines: socket.socket) -> None:
        for line in lines:
            with suppress(OSError):  # a thread that waits for it wakes
                line.shutdown(socket.SHUT_RDWR)
            line.close()
            self._lines.discard(line)

    def cut(self) -> None:
        """Close all connections that are open; new ones are taken."""
        self._close(*self._lines)

    def close(self) -> None:
        """Close them, and take no new ones."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
