"""`make gpu-papers`: the papers' numbers that need a GPU, the most telling first, within a budget of minutes.

Interrupted runs keep their state: the same command goes on with them, and passes over those that are complete.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.budget import DONE, FAILED, Budget, Outcome, table
from fcl_bench.papers.experiments import grid_cells

STSA, TABLE_6 = "stsa_scratch_cifar100", "fedprotip_table6"
#: Experiment and cell of its grid, the most telling first: STSA's row at beta 0.5, FedProTIP itself, the other betas,
#: and what FedProTIP is compared with; TARGET and LANDER, whose generators take the longest, come last.
ORDER = [(STSA, 1), (TABLE_6, 3), (STSA, 2), (STSA, 0), *((TABLE_6, cell) for cell in (2, 1, 0, 4, 5))]
#: The printed numbers beside which these runs stand.
TABLES = [("stsa", "Table 1"), ("fedprotip", "Table 6")]
#: Seconds below which it does not pay to start another run.
LEAST = 45.0


def cells(profile: str, seeds: int) -> list[tuple[str, ...]]:
    """The overrides of each run: all cells of the first seed, then of the next."""
    grids = {name: grid_cells(name, profile) for name in (STSA, TABLE_6)}
    first = [grids[experiment][cell] for experiment, cell in ORDER]
    return [
        tuple(f"seed={seed}" if own.startswith("seed=") else own for own in cell)
        for seed in range(seeds)
        for cell in first
    ]


def name_of(cell: tuple[str, ...]) -> str:
    """What sets a cell apart, for a table."""
    told = [own.partition("experiment=")[2] or own for own in cell if not own.startswith("profile=")]
    return " ".join(told)


def command_of(cell: tuple[str, ...], device: str, out: Path, data: Path | None) -> list[str]:
    """The run of a cell."""
    where = [f"device={device}", f"out={out}", "checkpoint_rounds=2"]
    source = [] if data is None else [f"data.path={data}"]
    return [sys.executable, "-m", "fcl_bench", *cell, *where, *source]


def main(typed: list[str] | None = None) -> int:
    """Do the runs that are not complete yet; exit code 1 if one failed. The budget's end is no failure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu papers", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; cpu to rehearse")
    parser.add_argument("--minutes", type=float, default=25, help="after which it stops; the same command goes on (25)")
    parser.add_argument("--quick", action="store_true", help="the same runs in miniature, on the digits: to rehearse")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-100; left out: downloaded, or the hub's cache")
    parser.add_argument("--seeds", type=int, default=3, help="of each cell (3)")
    parser.add_argument("--most", type=int, help="cells; left out: all")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    options = parser.parse_args(typed)
    budget, outcomes = Budget(options.minutes), list[Outcome]()
    profile = "quick" if options.quick else "full"
    planned = cells(profile, options.seeds)[: options.most]
    for cell in planned:
        command = command_of(cell, options.device, options.out, options.data)
        print(f"--- {name_of(cell)} ({max(0.0, budget.left) / 60:.1f} minutes left)", flush=True)
        outcomes.append(budget.run(name_of(cell), command, LEAST))
        if outcomes[-1].state not in (DONE, FAILED):
            break
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "papers.md"
    done = sum(own.state == DONE for own in outcomes)
    file.write_text(f"{done} of {len(planned)} runs are complete.\n\n{table(outcomes)}")
    print(f"\n{file.read_text()}written: {file}")
    for paper, table_ in TABLES if done else ():
        told = ["--out", str(options.out), "--paper", paper, "--table", table_]
        subprocess.run([sys.executable, "-m", "fcl_bench.cli.tables", *told], check=True)
    return int(any(own.state == FAILED for own in outcomes))
