"""Open rounds against synchronous ones: how far the classifiers are apart, and what many sites cost.

    python -m benchmarks open_rounds                                   # five methods, 20 clients, digits
    python -m benchmarks open_rounds --clients 10000 --repeat 3 --out benchmarks/measured/open_rounds.json

With --clients, AFL runs too with so many simulated sites in one process, on made-up features (2 samples for each site
and task), each run in a process of its own, synchronous and open ones by turns; of
processor seconds and memory the least counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from report import table_of, write
from safetensors.numpy import load_file
from scaling import MIB, Size, alone, features

import fcl_bench

METHODS = {
    "afl": ("method.upload=sums",),
    "stsa": ("method.M=512",),
    "fedncm": (),
    "fedlda": (),
    "ranpac": ("method.M=512",),
}
#: How rounds are taken, and in which order uploads come.
WAYS = {
    "synchronous": ("transport.rounds=synchronous",),
    "open, any order": ("transport.rounds=open",),
    "open, own order": ("transport.rounds=open", "transport.order=own"),
}


def measured(arguments: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """One run of the command in a process of its own: its record, classifier, processor seconds, peak bytes."""
    out = folder / "out"
    seconds, peak = alone([*arguments, f"out={out}", "force=true", "logger=none"])
    [path] = [file.parent for file in (out / "runs").glob("*/run.json")]
    found = result(path)
    shutil.rmtree(path)
    return {**found, "seconds": seconds, "peak": peak}


def result(path: Path) -> dict[str, Any]:
    """The record and the classifier of a run's folder."""
    record, model = json.loads((path / "run.json").read_text()), load_file(path / "model.safetensors")
    return {"record": record, "W": model["W"]}


def row(method: str, way: str, clients: int, found: dict[str, Any], synchronous: dict[str, Any]) -> dict[str, Any]:
    """What a run says beside the synchronous one."""
    record, W = found["record"], synchronous["W"]
    arrivals = record["transport"].get("arrivals")
    return {
        "method": method,
        "rounds": way,
        "clients": clients,
        "uploads": arrivals["absorbed"] if arrivals else None,
        "A_T": record["metrics"]["A_T"],
        "largest difference of W": float(np.abs(found["W"] - W).max()),
        "over the largest entry": float(np.abs(found["W"] - W).max() / np.abs(W).max()),
    }


def apart(folder: Path) -> list[dict[str, Any]]:
    """Each method with 20 clients on digits."""
    rows = []
    for method, knobs in METHODS.items():
        given = ("data=digits", "clients=20", "tasks=5", "partition.min_size=0", "wire.dtype=float64")
        given += (f"method={method}", *knobs)
        done = {way: fcl_bench.run(overrides=[*given, *keys, f"out={folder}"]) for way, keys in WAYS.items()}
        found = {way: result(own.path) for way, own in done.items()}
        rows += [row(method, way, 20, own, found["synchronous"]) for way, own in found.items()]
        print(method, file=sys.stderr, flush=True)
    return rows


def many(clients: int, tasks: int, repeat: int, folder: Path) -> list[dict[str, Any]]:
    """AFL with many sites."""
    size = Size(K=clients, T=tasks, C=10 * tasks, M=128, n=2 * clients * tasks)
    given = ("data=features", f"data.path={features(size, True, folder)}", "partition=iid", "method=afl")
    given += ("method.upload=sums", f"clients={clients}", f"tasks={tasks}")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for turn in range(repeat):
        for way, keys in WAYS.items():
            found[way].append(measured((*given, *keys), folder))
            print(f"{turn} {way}: {found[way][-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    rows = []
    first = found["synchronous"][0]
    for way, runs in found.items():
        rows.append(row("afl", way, clients, runs[0], first))
        for name, scale in (("seconds", 1), ("peak", MIB)):
            least, usual = (min(own[name] for own in found[which]) / scale for which in (way, "synchronous"))
            rows[-1] |= {
                "peak MiB" if scale == MIB else "processor seconds": least,
                f"of synchronous {name}": least / usual,
            }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=0, help="simulated sites of the large run; 0: none")
    parser.add_argument("--tasks", type=int, default=2, help="of the large run, of 10 classes each")
    parser.add_argument("--repeat", type=int, default=1, help="large runs of each kind")
    parser.add_argument("--out", type=Path, help="a .json file; a table beside it")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fcl-bench-open-") as place:
        rows = apart(Path(place))
        write(chosen.out, rows)
        rows += many(chosen.clients, chosen.tasks, chosen.repeat, Path(place)) if chosen.clients else []
    print(table_of(rows))
    write(chosen.out, rows)


if __name__ == "__main__":
    main()
