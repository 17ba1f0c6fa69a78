"""ClientApps that are forked from one process, which has imported Flower once: `python -m ...forks SOCKET`.

Flower starts a program for every message, `flwr-clientapp`, and most of its seconds are imports. On a node's path this
name stands for `handover.py`, which passes the arguments to the process here; where there is none, it is Flower's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from fcl_bench.flower import frames

COMMAND = "flwr-clientapp"
#: Seconds that somebody who has connected may take to say the arguments.
_SAY = 5.0


def write_command(folder: Path, path: Path, own: Path) -> None:
    """Write the program `flwr-clientapp` into a folder.

    Args:
        folder: for the program.
        path: the socket of `serve`.
        own: Flower's own program, which does the work where nobody serves.
    """
    parts = [sys.executable, "-IS", str(Path(__file__).with_name("handover.py")), str(path), str(own)]
    program = folder / COMMAND
    program.write_text(f'#!/bin/sh\nexec {shlex.join(parts)} "$@"\n')
    program.chmod(0o700)


def serve(line: socket.socket, work: Callable[[], object]) -> None:
    """Fork a process for every list of arguments that comes.

    Args:
        line: a listener.
        work: what the new process does, its arguments in `sys.argv`.
    """
    # Nobody asks how a process ended, so the kernel is told to forget it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asked, _ = line.accept()
        # Whoever gets no answer starts Flower's own program, and says so.
        with asked, contextlib.suppress(OSError):
            asked.settimeout(_SAY)
            frame = frames.receive(asked)
            if frame is None or _has_gone(asked):
                continue
            arguments = list(map(str, frame.header.get("arguments", ())))
            if os.fork() == 0:
                _be(arguments, work, (line, asked))
            frames.send(asked, {"taken": True})


def _has_gone(asked: socket.socket) -> bool:
    """Return whether who asked has lost patience, and does the work itself."""
    readable, _, _ = select.select([asked], [], [], 0)
    # Nothing more is to be said: what can be read is the end.
    return bool(readable)


def _be(arguments: Sequence[str], work: Callable[[], object], lines: Sequence[socket.socket]) -> None:
    """Do the work in a process that was just forked, and end it."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _end_with_parent()
        for line in lines:
            line.close()
        sys.argv = [COMMAND, *arguments]
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the interpreter's own end, which waits for any thread that is left.
        os._exit(code)


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends.

    A ClientApp whose SuperNode is gone asks it for ever whether it is there, even at its own end.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> int:
    """Import Flower, then fork. Returns 2 where a fork would be unsafe, so that Flower's own way is taken."""
    # The ClientApp computes nothing, and threads do not survive a fork.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    from flwr.supernode.cli import flwr_clientapp

    # What the relay imports.
    from fcl_bench.flower import records  # noqa: F401
    from fcl_bench.flower.patience import retry_soon

    retry_soon()
    if threading.active_count() > 1:
        print("fcl-bench: Flower's modules start threads; each message's process starts anew", file=sys.stderr)
        return 2
    with frames.listener(Path(sys.argv[1])) as line:
        serve(line, flwr_clientapp)
    return 0


if __name__ == "__main__":
    sys.exit(main())
