"""How seconds, memory and bytes grow with K, T, C, M and n, compared with the methods' formulas.

Every measurement is a whole run of the command in a process of its own, on made-up features, so that its peak memory is
its own. One of the five sizes varies at a time; the exponent of a growth is log(last / first) / log of the sizes'
ratio, and beside it stands the exponent of the formula at the same two sizes.

    python -m benchmarks scaling --quick            # under two minutes on two cores
    python -m benchmarks scaling --markdown outputs/bench/scaling.md
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, table, write

#: Width of the features before random ones, for the methods that use those.
INPUTS = 64
DUMMY_CLIENTS = 10
RANK = 64
MIB = 2**20
#: Samples scored at a time, and bytes of test samples that are kept (`engine/evaluation.py`, `closed_form/base.py`).
EVALUATION_BATCH, KEPT = 1024, 2**28


@dataclass(frozen=True)
class Size:
    """One run's sizes: clients, tasks, classes, width of what the Gram matrix is of, training samples."""

    K: int = 10
    T: int = 10
    C: int = 100
    M: int = 128
    n: int = 50_000


@dataclass(frozen=True)
class Measured:
    """The cost of one run.

    Attributes:
        uploads: exchanges with statistics in them.
        client: client seconds per upload.
        server: server seconds per upload, its share of the solve included.
        wall: seconds of the whole process.
        peak: its peak memory in bytes.
        upload: bytes of the largest upload for one task.
        sent: bytes of all uploads.
    """

    uploads: int
    client: float
    server: float
    wall: float
    peak: int
    upload: int
    sent: int


@dataclass(frozen=True)
class Method:
    """A method's knobs and formulas.

    Attributes:
        wide: whether M is the width of the features themselves.
        upload: bytes of the largest upload on a float32 wire, from the sizes and the classes of a task.
        state: bytes of the server's own matrices in float64, copies while it solves included.
    """

    overrides: tuple[str, ...]
    wide: bool
    upload: Callable[[Size, int], int]
    state: Callable[[Size], int]


def _gram_state(s: Size) -> int:
    return 8 * (3 * s.M**2 + 3 * s.M * s.C)


METHODS = {
    "afl": Method((), True, lambda s, c: 4 * (s.M**2 + s.M * c), _gram_state),
    # Registration names the classes; the statistics bring their column numbers, in int64.
    "afcl": Method((), True, lambda s, c: 4 * (s.M**2 + s.M * c) + (4 + 4) * c, _gram_state),
    "stsa_e": Method(
        (f"method.dummy_clients={DUMMY_CLIENTS}", "method.gamma=1e6"),
        False,
        lambda s, c: 4 * DUMMY_CLIENTS * (s.M + 1) * c,
        lambda s: _gram_state(s) + 8 * DUMMY_CLIENTS * s.M * math.ceil(s.C / s.T),
    ),
    "fedran": Method(
        (f"method.rank={RANK}",),
        False,
        lambda s, c: 4 * (s.M * RANK + RANK + s.M * c),
        lambda s: 8 * (8 * s.M * RANK + 3 * s.M * s.C),
    ),
}

#: Axis -> its values; the others stay at the base. Up to ten thousand clients, a thousand tasks and classes.
FULL: tuple[Size, dict[str, tuple[int, ...]]] = (
    Size(),
    {
        "K": (10, 100, 1000, 10_000),
        "T": (10, 100),
        "C": (100, 300, 1000),
        "M": (128, 256, 512, 1024),
        "n": (12_500, 25_000, 50_000),
    },
)
#: A thousand tasks want a thousand classes: an axis of its own.
LONG = Size(K=5, T=1000, C=1000, M=64)
QUICK: tuple[Size, dict[str, tuple[int, ...]]] = (
    Size(K=10, T=5, C=50, M=64, n=5000),
    {"K": (10, 500), "T": (5, 50), "C": (50, 200), "M": (64, 256), "n": (2500, 5000)},
)


def features(size: Size, wide: bool, folder: Path) -> Path:
    """A feature file of classes around random centres; 5,000 test samples at most."""
    d = size.M if wide else INPUTS
    path = folder / f"n{size.n}-d{d}-C{size.C}.npz"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((size.C, d), dtype=np.float32)
    arrays = {}
    for side, count in (("train", size.n), ("test", max(min(5000, size.n // 5), size.C))):
        labels = np.arange(count) % size.C
        arrays[f"x_{side}"] = (centres[labels] + rng.standard_normal((count, d), dtype=np.float32)).astype(np.float16)
        arrays[f"y_{side}"] = labels
    np.savez(path, **arrays)
    return path


def arguments_of(name: str, size: Size, folder: Path, out: Path, *more: str) -> list[str]:
    """What the command is given for one run of these sizes; its features are made in `folder`."""
    wide = METHODS[name].wide
    return [
        *("data=features", f"data.path={features(size, wide, folder)}", f"method={name}", *more),
        *(f"clients={size.K}", f"tasks={size.T}", "partition=iid", f"out={out}", "force=true"),
        *(() if wide else (f"method.M={size.M}",)),
    ]


def alone(arguments: Sequence[str]) -> tuple[float, int]:
    """Processor seconds and peak bytes of the command in a process of its own. Raises RuntimeError if it fails."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-m", "fcl_bench", *arguments], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"fcl-bench {' '.join(arguments)} failed:\n{log.read().decode()[-2000:]}")
    # Linux counts in KiB, macOS in bytes.
    peak = usage.ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    return usage.ru_utime + usage.ru_stime, peak


def measure(name: str, size: Size, folder: Path) -> Measured:
    """One run of the command. Raises RuntimeError where it does not end well."""
    out = folder / "out"
    arguments = arguments_of(name, size, folder, out, *METHODS[name].overrides)
    _, peak = alone(arguments)
    [run] = [path.parent for path in (out / "runs").glob("*/run.json")]
    record = json.loads((run / "run.json").read_text())
    with (run / "uploads.csv").open() as file:
        uploads = sum(row["stage"] == "statistics" and row["up_bytes"] != "0" for row in csv.DictReader(file))
    runtime, communication = record["runtime"], record["communication"]
    shutil.rmtree(run)
    return Measured(
        uploads,
        runtime["client_seconds"] / uploads,
        runtime["server_seconds"] / uploads,
        runtime["total_seconds"],
        peak,
        communication["up_max_bytes"],
        communication["up_total_bytes"],
    )


def held(name: str, size: Size) -> int:
    """Bytes that grow with the sizes, by the formulas: data, deal, ledger, answers, the server's state, test scores."""
    method = METHODS[name]
    d = size.M if method.wide else INPUTS
    tests = max(min(5000, size.n // 5), size.C)
    rounds = 2 if name == "afcl" else 1
    return (
        2 * (size.n + tests) * d  # float16 features
        + 8 * (size.n + (size.K + 1) * size.T)  # who holds what
        + 54 * 3 // 2 * size.K * size.T * rounds  # the ledger, with room to grow
        + 8 * 4 * size.T**2  # right answers
        + method.state(size)
        + min(KEPT, 8 * tests * size.M)
        + 8 * min(EVALUATION_BATCH, tests) * (d + size.M + 3 * size.C)
    )


def exponent(first: float, last: float, ratio: float) -> float:
    """e in last / first = ratio ** e; 0 where nothing was measured."""
    return math.log(last / first) / math.log(ratio) if first > 0 and last > 0 else 0.0


def growth_rows(axis: str, name: str, runs: list[tuple[Size, Measured]]) -> list[list[str]]:
    """One row per size of one axis, then the exponents between the first and the last."""
    rows = []
    for size, found in runs:
        upload = METHODS[name].upload(size, math.ceil(size.C / size.T))
        rows.append(
            [
                *(axis, name, f"{getattr(size, axis):,}", f"{found.uploads:,}"),
                *(f"{1e3 * found.client:.3f}", f"{1e3 * found.server:.3f}", f"{found.wall:.1f}"),
                *(f"{found.peak / MIB:.0f}", f"{held(name, size) / MIB:.1f}"),
                *(f"{found.upload:,}", f"{found.upload / upload:.3f}", f"{found.sent / MIB:.1f}"),
            ]
        )
    (first, a), (last, b) = runs[0], runs[-1]
    if len(runs) > 1:
        ratio = getattr(last, axis) / getattr(first, axis)
        uploads = [METHODS[name].upload(size, math.ceil(size.C / size.T)) for size in (first, last)]
        rows.append(
            [
                *(axis, name, "exponent", f"{exponent(a.uploads, b.uploads, ratio):.2f}"),
                *(f"{exponent(getattr(a, it), getattr(b, it), ratio):.2f}" for it in ("client", "server", "wall")),
                f"{(b.peak - a.peak) / MIB:+.0f}",
                f"{(held(name, last) - held(name, first)) / MIB:+.1f}",
                f"{exponent(a.upload, b.upload, ratio):.2f}",
                f"(formula {exponent(uploads[0], uploads[1], ratio):.2f})",
                f"{exponent(a.sent, b.sent, ratio):.2f}",
            ]
        )
    return rows


HEADER = [
    *("axis", "method", "size", "uploads", "client ms / upload", "server ms / upload", "run s"),
    *("peak MiB", "growing part by formula, MiB", "largest upload, B", "/ formula", "all uploads, MiB"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under two minutes on two cores")
    parser.add_argument("--methods", default="afl,afcl,stsa_e", help=f"of {','.join(METHODS)}")
    parser.add_argument("--axes", default="", help="of K,T,C,M,n,long (1,000 tasks); default: all")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each size; the fastest counts")
    parser.add_argument("--markdown", type=Path, help="write the table there, too; the numbers beside it as .json")
    chosen = parser.parse_args()
    base, axes = QUICK if chosen.quick else FULL
    long = [] if chosen.quick else ["long"]
    wanted = chosen.axes.split(",") if chosen.axes else [*axes, *long]
    names = chosen.methods.split(",")
    if unknown := [*(set(names) - set(METHODS)), *(set(wanted) - set(axes) - {"long"})]:
        parser.error(f"unknown: {', '.join(unknown)}")

    done: dict[tuple[str, Size], Measured] = {}
    rows: list[list[str]] = []
    kept: list[dict[str, Any]] = []
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="fcl-bench-scaling-") as place:
        for axis in wanted:
            for name in names:
                sizes = [LONG] if axis == "long" else [replace(base, **{axis: value}) for value in axes[axis]]
                for size in sizes:
                    if (name, size) not in done:
                        runs = [measure(name, size, Path(place)) for _ in range(chosen.repeat)]
                        done[name, size] = min(runs, key=lambda run: run.wall)
                        print(f"{axis} {name} {size}: {done[name, size].wall:.1f} s", file=sys.stderr, flush=True)
                column = "T" if axis == "long" else axis
                rows += growth_rows(column, name, [(size, done[name, size]) for size in sizes])
                kept += [{"method": name, **asdict(size), **asdict(done[name, size])} for size in sizes]
    text = table(HEADER, rows, words=3)
    print(text)
    write(chosen.markdown, kept, text)


if __name__ == "__main__":
    main()
