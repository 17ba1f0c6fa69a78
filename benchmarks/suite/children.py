"""Commands in processes of their own: their seconds, and their peak of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: The command as it is installed beside this Python.
COMMAND = str(Path(sys.executable).parent / "fcl-bench")


def run(*arguments: str) -> str:
    """Run a command to its end: its output. Raises `RuntimeError` with what it said if it fails."""
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def python(code: str) -> list[str]:
    """The command that runs a line of Python."""
    return [sys.executable, "-c", code]


#: Runs its arguments and says the peak of that child. Linux counts what the parent had resident at the fork as the
#: child's, so the parent has to be small, which a process with torch is not.
_SMALL_PARENT = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def peak_gib(arguments: Sequence[str]) -> float:
    """Run a command to its end: the most memory it had resident at once, in GiB, as the system counts it.

    Of one process: what the command starts itself is not added. Raises `RuntimeError` as `run` does.
    """
    said = run(sys.executable, "-S", "-c", _SMALL_PARENT, *arguments)
    return int(said) * (1 if sys.platform == "darwin" else 1024) / 2**30


def whole_run(features: Path, out: Path, *overrides: str) -> list[str]:
    """The command of a whole run from cached features, in the setting of the lines: d as the file has it, T 10, K 5."""
    settings = ["data=features", f"data.path={features}", "tasks=10", "clients=5", "force=true", f"out={out}"]
    return [COMMAND, *settings, *overrides]
