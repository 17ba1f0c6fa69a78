"""Commands of this environment as processes of their own, for tests of a real federation."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

#: Seconds for whatever a loaded machine takes.
PATIENCE = 240

#: Starts a command under a name, which its log has, too.
Start = Callable[..., subprocess.Popen]


@contextmanager
def commands(folder: Path, given: Mapping[str, str] | None = None) -> Iterator[Start]:
    """Starts commands in a folder, with these environment variables, and ends them with the block."""
    processes: list[subprocess.Popen] = []
    # As many threads as this process has: both ends are to round alike.
    own = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "FLWR_HOME": str(folder / "flwr")}
    own |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", **(given or {})}

    def start(name: str, *command: str) -> subprocess.Popen:
        with (folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **own}, stdout=log, stderr=log, cwd=folder, start_new_session=True
            )
        processes.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(processes):
            process.terminate()
        try:
            for process in processes:
                process.wait(30)
        finally:
            # What they have started, too: a ClientApp outlived a test by an hour, stuck at its own end.
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def waited_for(what: Callable[[], object], folder: Path, needed: Mapping[str, subprocess.Popen]) -> None:
    """Wait until something is so; a process that it needs may not end before, and its log in the folder says why."""
    until = time.monotonic() + PATIENCE
    while not what():
        for name, process in needed.items():
            code = process.poll()
            assert code is None, f"{name} ended with {code}: {(folder / f'{name}.log').read_text()[-2000:]}"
        assert time.monotonic() < until, f"{', '.join(needed)}: nothing within {PATIENCE} s"
        time.sleep(0.2)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
