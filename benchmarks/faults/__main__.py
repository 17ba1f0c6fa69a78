"""The campaign: `python -m benchmarks.faults [PART ...] [--quick] [--most N] [--minutes N] [--seed N] [--only CASE]`.

Prints what fails, with the command that repeats it, and a line for each part; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
from pathlib import Path

# Before torch is imported: one thread, since processes are forked, and none of them waits by spinning.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from benchmarks.faults.combinations import Combinations
from benchmarks.faults.concurrency import Concurrency
from benchmarks.faults.configurations import Configurations
from benchmarks.faults.damage import Damage
from benchmarks.faults.kills import Kills
from benchmarks.faults.part import Part, carried_out
from benchmarks.faults.scenarios import scratch_root
from benchmarks.faults.uploads import Uploads
from benchmarks.faults.writes import Writes

PARTS: dict[str, type[Part]] = {
    part.name: part for part in (Writes, Kills, Concurrency, Configurations, Combinations, Damage, Uploads)
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none for all")
    parser.add_argument("--quick", action="store_true", help="a few cases of each part")
    parser.add_argument("--most", type=int, help="cases of each part (0: all)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of each part, after which it stops")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--only", default="", metavar="CASE", help="one case of one part, as a failure names it")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown or (arguments.only and len(arguments.parts) != 1):
        parser.error(f"the parts are {', '.join(PARTS)}; --only needs one")
    # Ignored signals pass to child processes: under nohup, or in the background of a script, `kills` would try nothing.
    for ignored in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = 0
    for name in arguments.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="fcl-faults-", dir=scratch_root()) as scratch:
            part = PARTS[name](Path(scratch), arguments.seed)
            usual = part.quick if arguments.quick else part.full
            result = carried_out(
                part, usual if arguments.most is None else arguments.most, arguments.only, arguments.minutes
            )
        print(result.line(), flush=True)
        failed += len(result.failed)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
