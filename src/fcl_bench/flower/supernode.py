"""Flower's SuperNode with shorter waits: `python -m fcl_bench.flower.supernode`, arguments of flower-supernode.

A SuperNode that finds no message sleeps for 3 seconds, and half a second between two looks for a reply. Flower has no
settings for these waits, and a round of a federation consists of them. So they begin short and grow with the time
waited, up to Flower's own: a node that waits for long looks no more often than Flower's.

A SuperNode that is beyond help ends, so that another one is started: Flower's own stays, and does nothing any more,
after an answer of the SuperLink that was damaged on its way, since a thread of it goes on to serve.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

#: Seconds of a first wait, and the share of the time waited so far that a later wait may take.
FIRST, SHARE = 0.2, 0.2
#: Seconds between two tries to reach a SuperLink that is gone, at most; Flower's own are 20.
RETRY = 5


class Waits:
    """The module `time`, as a module of Flower sees it, with a `sleep` that begins short.

    Flower's module sleeps in loops, and for another number of seconds in each: where that number changes, something
    has happened, and waits are short again.
    """

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds` at most."""
        now = time.monotonic()
        if seconds != self._seconds:
            self._seconds, self._since = seconds, now
        time.sleep(min(seconds, max(FIRST, SHARE * (now - self._since))))


def look_soon() -> None:
    """Have the SuperNode of this process look soon. A version of Flower of another form keeps its own waits."""
    from flwr.supercore.retry import http_retry
    from flwr.supernode import start_client_internal as module

    if getattr(module, "time", None) is time and hasattr(http_retry, "MAX_RETRY_DELAY"):
        vars(module)["time"], http_retry.MAX_RETRY_DELAY = Waits(), RETRY
    else:
        print("fcl-bench: this version of Flower has its waits elsewhere; a round takes 3 s longer", file=sys.stderr)


def _end(*error: Any) -> NoReturn:
    """End this process, whatever its threads do; `error` is that of a thread."""
    for lost in error:
        threading.__excepthook__(lost)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Be `flower-supernode`."""
    from flwr.supernode.cli import flower_supernode

    look_soon()
    # A thread that fails is the heartbeat's: without it the SuperLink counts the node as gone.
    threading.excepthook = _end
    # Flower's processes tell their kind by this name.
    sys.argv[0] = "flower-supernode"
    try:
        flower_supernode()
    except Exception:
        traceback.print_exc()
    finally:
        _end()


if __name__ == "__main__":
    main()
