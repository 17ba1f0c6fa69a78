"""Fuzz every decoder: `python -m benchmarks.fuzz [TARGET ...] [--inputs N] [--seed N] [--only NUMBER]`.

Each decoder gets its share of the inputs, in processes with limits of time and memory. Whatever is neither read nor
refused in one printable line is printed with the command that repeats it; the exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

from benchmarks.faults.forks import forked
from benchmarks.faults.part import draw
from benchmarks.faults.scenarios import scratch_root
from benchmarks.fuzz.target import Target, quietly, trouble_of
from benchmarks.fuzz.targets import TARGETS

#: Inputs of one process, and the seconds after which it counts as hanging.
_CHUNK, _SECONDS = 20_000, 900
#: Findings of one process that are printed.
_SHOWN = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; none for all")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all decoders together (1000000)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one input of one decoder, as a finding names it")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"there is no {min(unknown)}; the decoders are {', '.join(TARGETS)}")
    found = 0
    for name in arguments.targets or TARGETS:
        inputs = max(1, arguments.inputs * TARGETS[name].share // 1_000_000)
        with tempfile.TemporaryDirectory(prefix="fcl-fuzz-", dir=scratch_root()) as scratch:
            numbers = range(inputs) if arguments.only is None else range(arguments.only, arguments.only + 1)
            found += fuzzed(TARGETS[name](Path(scratch)), numbers, arguments.seed)
    return int(found > 0)


def fuzzed(target: Target, numbers: range, seed: int) -> int:
    """Try these inputs; returns how many were neither read nor refused in one line."""
    found, begin = 0, time.perf_counter()
    for start in range(numbers.start, numbers.stop, _CHUNK):
        part = range(start, min(start + _CHUNK, numbers.stop))

        def work(part: range = part) -> int:
            return quietly(lambda: _chunk(target, part, seed))

        ended = forked(work, seconds=_SECONDS, room=target.room)
        lines = re.findall(r"^finding (\d+) (.*)$", ended.out, re.MULTILINE)
        for number, trouble in lines[:_SHOWN]:
            print(f"{target.name} {number}: {trouble}")
            print(f"  python -m benchmarks.fuzz {target.name!r} --seed {seed} --only {number}", flush=True)
        found += len(lines)
        if ended.code != 0:
            print(f"{target.name} {part.start} to {part.stop - 1}: exit code {ended.code}: {ended.last()}", flush=True)
            found += 1
    seconds = time.perf_counter() - begin
    print(f"{target.name}: {len(numbers)} inputs, {found} findings, {seconds:.0f} s", flush=True)
    return found


def _chunk(target: Target, numbers: range, seed: int) -> int:
    warnings.simplefilter("ignore")
    for number in numbers:
        if trouble := trouble_of(target, target.drawn(draw(seed, target.name, number))):
            print("finding", number, trouble, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
