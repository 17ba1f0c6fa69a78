"""Processor seconds that each further job of a sweep takes: default runs on digits, all in one command.

    python -m benchmarks sweep_cost                                    # the default run (FedRAN), 24 seeds
    python -m benchmarks sweep_cost --methods afl,stsa,fedran --seeds 8
    python -m benchmarks sweep_cost --profile afl                      # where the time of further jobs goes

A sweep of n jobs and one of its first job alone take turns, each in a process and a folder of its own. The difference
of their processor seconds (all threads, and what they start), over n - 1, is the cost of one further job. It includes
neither the start of Python nor the first use of a library (except for libraries that only the later ones of several
methods use). Processor seconds are the same on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import write


def processor_seconds(arguments: list[str], threads: int) -> float:
    """User and system seconds of `fcl-bench ARGUMENTS`, which has to end well, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "fcl_bench", *arguments, f"out={folder}"],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def profiled(arguments: list[str], threads: int) -> None:
    """Print which functions the processor seconds of the command go to, its later jobs' beside its first one's."""
    program = (
        "import cProfile, pstats, sys, time\n"
        "import fcl_bench.cli.app as app\n"
        "carry_out, jobs = app.carry_out, []\n"
        "profile = cProfile.Profile(time.process_time)\n"
        "def counted(*arguments):\n"
        "    begin = time.process_time()\n"
        "    try:\n"
        "        return carry_out(*arguments)\n"
        "    finally:\n"
        "        jobs.append(time.process_time() - begin)\n"
        "        if len(jobs) == 1:\n"
        "            profile.enable()\n"
        "app.carry_out = counted\n"
        "app.main()\n"
        "profile.disable()\n"
        "print('seconds of each job:', ' '.join(f'{seconds:.2f}' for seconds in jobs), file=sys.stderr)\n"
        "pstats.Stats(profile, stream=sys.stderr).sort_stats('cumulative').print_stats(120)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", program, *arguments, f"out={folder}"],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            check=True,
            stdout=subprocess.DEVNULL,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedran")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", metavar="METHOD", help="measure nothing: profile a sweep of this method")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    parser.add_argument("more", nargs="*", help="further overrides of all jobs, such as beta=1")
    given = parser.parse_args()
    shared = ["data=digits", *given.more]
    seeds = f"seed=range({given.seeds})"
    if given.profile:
        profiled(["-m", f"method={given.profile}", seeds, *shared], given.threads)
        return
    methods = given.methods.split(",")
    jobs = len(methods) * given.seeds
    if given.seeds < 1 or jobs < 2:
        parser.error(f"--seeds={given.seeds}: there is no further job (an integer from 2)")
    first = ["-m", f"method={methods[0]}", "seed=0", *shared]
    whole = ["-m", f"method={given.methods}", seeds, *shared]
    found: dict[str, list[float]] = {"first": [], "whole": [], "further": []}
    for _ in range(given.repeats):
        one, all_of_them = processor_seconds(first, given.threads), processor_seconds(whole, given.threads)
        found["first"].append(one)
        found["whole"].append(all_of_them)
        found["further"].append((all_of_them - one) / (jobs - 1))
        print(f"first job {one:.2f} s, all {jobs} {all_of_them:.2f} s, each further job {found['further'][-1]:.3f} s")
    print(f"processor seconds per further job, median of {given.repeats}: {statistics.median(found['further']):.3f}")
    file = given.out / "sweep.json"
    write(file, [{"sweep": " ".join(whole), "jobs": jobs, "threads": given.threads, "processor seconds": found}])
    print(f"written: {file}")


if __name__ == "__main__":
    main()
