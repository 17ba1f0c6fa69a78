"""The gain or cost of two ranks: the same run in one process and over ranks, in turn, one thread per process.

`afl` is the case with nothing to gain: 100 clients whose turns take milliseconds, each followed by an upload of a Gram
matrix. `training` is the case that ranks are for: rounds of local training, small messages. Each round runs both sides,
in changing order, and the ratio is that of one round; the table has their median. Two models that differ in a bit end
the benchmark. `seconds` are the run's own, from its plan to its record; `wall` has imports and the launcher, too.

Two cores of a shared machine are rarely twice one core. So each round also starts as many runs in one process at once
as there are ranks, which share nothing: `at best` is what these gain over one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
#: The cases, and the bound on the ratio of one process's seconds to the ranks'.
CASES: dict[str, tuple[list[str], float]] = {
    "afl": (["method=afl", "clients=100", "tasks=10", "beta=0.5"], 1 / 1.5),
    "training": (
        [
            *("method=fedavg", "data=digits", "backbone=tiny", "clients=8", "tasks=2", "partition=iid"),
            *("method.training.rounds=6", "method.training.epochs=16", "method.training.batch_size=32"),
        ],
        1.7,
    ),
}


def features_at(path: Path, samples: int, width: int) -> None:
    """Random features of 100 classes: what they are does not change how long they take."""
    rng = np.random.default_rng(0)
    sides = {"train": samples, "test": samples // 10}
    arrays = {f"x_{side}": rng.standard_normal((count, width), dtype=np.float32) for side, count in sides.items()}
    np.savez(path, **arrays, **{f"y_{side}": np.arange(count) % 100 for side, count in sides.items()})


def measured(overrides: list[str], out: Path, ranks: int) -> tuple[float, float, bytes]:
    """Seconds of a run by its own watch and by ours, and its model."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "fcl_bench"]
    command = [sys.executable, *(launcher if ranks > 1 else ["-m", "fcl_bench"])]
    transport = "ranks" if ranks > 1 else "in_process"
    paths = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, *overrides, f"out={out}", f"transport={transport}", "force=true"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    wall = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    [folder] = (out / "runs").glob("*-*")
    record = json.loads((folder / "run.json").read_text())
    return record["runtime"]["total_seconds"], wall, (folder / "model.safetensors").read_bytes()


def side_by_side(overrides: list[str], out: Path, processes: int) -> float:
    """Seconds of the slowest of as many runs in one process each, started at once in folders of their own."""
    with ThreadPoolExecutor(processes) as pool:
        done = pool.map(lambda number: measured(overrides, out / str(number), 1), range(processes))
        return max(seconds for seconds, _, _ in done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5, help="how often both sides are measured")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=50_000, help="training samples of afl")
    parser.add_argument("--width", type=int, default=512, help="features of a sample of afl")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for case in arguments.cases:
            overrides, bound = CASES[case]
            if case == "afl":
                path = Path(scratch) / "features.npz"
                features_at(path, arguments.samples, arguments.width)
                overrides = [*overrides, "data=features", f"data.path={path}"]
            rows = []
            for number in range(arguments.rounds):
                sides = [1, arguments.ranks] if number % 2 == 0 else [arguments.ranks, 1]
                found = {side: measured(overrides, Path(scratch) / f"{case}-{side}", side) for side in sides}
                alone, ranks = found[1], found[arguments.ranks]
                best = arguments.ranks * alone[0] / side_by_side(overrides, Path(scratch) / case, arguments.ranks)
                if alone[2] != ranks[2]:
                    raise SystemExit(f"{case}: the models of one process and of {arguments.ranks} ranks differ")
                rows.append((alone[0] / ranks[0], best))
                sides_told = f"one process {alone[0]:.2f} s, {arguments.ranks} ranks {ranks[0]:.2f} s"
                walls = f"wall {alone[1]:.1f} and {ranks[1]:.1f} s"
                load = os.getloadavg()[0]
                print(
                    f"{case}: {sides_told}, ratio {rows[-1][0]:.2f}, at best {best:.2f}; {walls}; load {load:.1f}",
                    flush=True,
                )
            ratio, best = (statistics.median(row[column] for row in rows) for column in (0, 1))
            holds = ratio >= bound
            failed |= not holds
            told = "holds" if holds else "DOES NOT HOLD"
            print(f"{case}: median ratio {ratio:.2f}, at best {best:.2f}, bound {bound:.2f}, {told}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
