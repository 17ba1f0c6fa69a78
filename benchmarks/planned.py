"""Compares what `fcl-bench plan` says of ten commands with what they then take, as a table in Markdown.

python -m benchmarks planned FEATURES [NUMBER ...]

FEATURES is the .npz of CIFAR-100's features (docs/results/index.md). Of each number (1 to 10; all by default) the plan
and then the runs are made in processes of their own, one after the other, in a new folder. Seconds are `total_seconds`
of run.json, added over a sweep's runs; memory is the most that one run has at its peak. Cells: planned/happened.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path

from fcl_bench.cli.plan import planned

FEATURES = "data=features data.path={} tasks=10"
COMMANDS = (
    "method=stsa method.M=512",
    "method=stsa method.M=2048",
    f"{FEATURES} method=afl",
    f"{FEATURES} method=afl clients=50",
    "method=fedavg method.trains=features method.training.rounds=1",
    f"{FEATURES} method=fedavg method.trains=features method.training.rounds=10",
    "method=fedavg backbone=tiny method.training.rounds=5",
    f"{FEATURES} method=gaussian_sketch",
    f"{FEATURES} method=centred_sketch clients=50",
    "-m method=afl,fedncm,stsa seed=0,1",
)


def compared(command: str) -> tuple[list[float], list[float]]:
    """Seconds, MiB of memory and MiB of disk: as planned, and as they then are."""
    with tempfile.TemporaryDirectory() as place:
        mine = [sys.executable, str(Path(__file__).resolve()), "--plan", *command.split()]
        rows = json.loads(subprocess.run(mine, cwd=place, check=True, capture_output=True, text=True).stdout)
        run = [sys.executable, "-m", "fcl_bench", *command.split()]
        subprocess.run(run, cwd=place, check=True, capture_output=True)
        folders = [file.parent for file in Path(place).glob("outputs/runs/*/run.json")]
        times = [json.loads((folder / "run.json").read_text())["runtime"] for folder in folders]
        held = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    seconds, memory, disk = zip(*rows, strict=True)
    peak = max(found["peak_memory_bytes"] for found in times)
    happened = [sum(found["total_seconds"] for found in times), peak / 2**20, held / 2**20]
    return [sum(seconds), max(memory) / 2**20, sum(disk) / 2**20], happened


def main() -> None:
    if sys.argv[1] == "--plan":
        multirun, typed = sys.argv[2] == "-m", [word for word in sys.argv[2:] if word != "-m"]
        print(json.dumps([astuple(row.rest) for row in planned(typed, multirun)]))
        return
    features, wanted = str(Path(sys.argv[1]).resolve()), list(map(int, sys.argv[2:])) or range(1, len(COMMANDS) + 1)
    print("| command | seconds | memory | disk |\n| --- | ---: | ---: | ---: |")
    for number in wanted:
        command = COMMANDS[number - 1].format(features)
        pairs = [
            "/".join(f"{value:.0f}" if value >= 1000 else f"{value:.3g}" for value in pair)
            for pair in zip(*compared(command), strict=True)
        ]
        print(f"| `{command.replace(features, 'FILE')}` | {' | '.join(pairs)} |", flush=True)


if __name__ == "__main__":
    main()
