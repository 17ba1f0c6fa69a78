"""Pack the small files of a track's runs beside its rows, so that every number can be looked into.

python -m benchmarks leaderboard_runs TRACK [FOLDER]

FOLDER is what `fcl-bench leaderboard run --out` had (outputs/leaderboard). results/leaderboard/TRACK.tar.xz then has
a folder per row, named by the run's id. Equal runs give an equal archive.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fcl_bench.files import replacing
from fcl_bench.leaderboard.store import Store, published

_FILES = ("run.json", "config.yaml", "accuracy_matrix.csv", "tasks.csv")


def main(track: str, folder: str = "outputs/leaderboard") -> None:
    wanted = {row["run_id"] for row in Store(Path(folder), track).rows}
    found = {path.name.rpartition("-")[2]: path for path in (Path(folder) / track / "runs").iterdir()}
    if missing := sorted(wanted - found.keys()):
        raise SystemExit(f"{folder}/{track}/runs lacks {len(missing)} of {len(wanted)} runs, such as {missing[0]}")
    with replacing(packed(track)) as new, tarfile.open(new, "w:xz", preset=9) as archive:
        for run in sorted(wanted):
            for name in _FILES:
                content = (found[run] / name).read_bytes()
                entry = tarfile.TarInfo(f"{run}/{name}")  # of 1970, and nobody's
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    print(f"{packed(track)}: {len(wanted)} runs, {packed(track).stat().st_size / 2**20:.2f} MiB")


def packed(track: str) -> Path:
    """The archive of a track's runs."""
    return published() / f"{track}.tar.xz"


def records(track: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The id and the run.json of each packed run."""
    with tarfile.open(packed(track)) as archive:
        for entry in archive:
            content = archive.extractfile(entry)
            if content and entry.name.endswith("/run.json"):
                yield entry.name.partition("/")[0], json.load(content)


if __name__ == "__main__":
    main(*sys.argv[1:])
