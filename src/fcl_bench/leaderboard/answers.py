"""Which test samples the runs of a track classify rightly at the end: one bit each, for intervals over test samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fcl_bench.files import replacing
from fcl_bench.results.best import stored_shares


class Answers:
    """The answers of runs, each by its id, in one NumPy file: `run_id`, `samples` (N) and `right`, N bits in bytes.

    Args:
        path: the file; where there is none, nothing is known yet.

    Raises:
        ValueError, OSError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._of: dict[str, np.ndarray] = {}
        if path.is_file():
            for run, samples, right in np.load(path, allow_pickle=False):
                self._of[str(run)] = np.unpackbits(right, count=int(samples)).astype(bool)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._of

    def put(self, run_id: str, right: np.ndarray | None) -> None:
        """Add (N,) bools of a run, in the order of the test samples; None, of a run without answers, adds nothing."""
        if right is not None:
            self._of[run_id] = right

    def save(self, path: Path, runs: list[str]) -> None:
        """Write the answers of these runs, and drop the others; without any, no file is left."""
        self._of = {run: self._of[run] for run in runs if run in self._of}
        if not self._of:
            path.unlink(missing_ok=True)
            return
        packed = {run: np.packbits(right) for run, right in self._of.items()}
        longest = max(map(len, packed.values()))
        kind = [("run_id", f"U{max(map(len, packed))}"), ("samples", "<u4"), ("right", "u1", (longest,))]
        rows = np.zeros(len(packed), kind)
        for row, (run, bits) in zip(rows, packed.items(), strict=True):
            row["run_id"], row["samples"] = run, len(self._of[run])
            row["right"][: len(bits)] = bits
        with replacing(path) as new, new.open("wb") as file:
            np.save(file, rows, allow_pickle=False)

    def shares(self, measure: str, value: float, run_id: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Test samples and what each adds to a run's A_T, as `best.stored_shares` has it; None if that is not known."""
        right = self._of.get(run_id)
        if measure != "A_T" or right is None:
            return None
        shares = 100.0 * right / len(right)
        return (np.arange(len(right)), shares) if np.isclose(shares.sum(), value, rtol=0, atol=1e-6) else None


def right_of(folder: Path, final: float) -> np.ndarray | None:
    """(N,): whether each test sample, by its index, is classified rightly after the last task; None if it is not known.

    Args:
        folder: of a run.
        final: its A_T.
    """
    shares = stored_shares("A_T", final, str(folder))
    return None if shares is None else shares[1] > 0
