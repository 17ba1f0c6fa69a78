"""The rows of a track: one per run in NAME.csv, what they share in NAME.yaml, the runs' answers in NAME.npy.

A command that begins in an empty folder takes over the rows that the package brings, so that a method of one's own is
put beside them without running them again.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fcl_bench.config import YAML_LOADER
from fcl_bench.errors import UserError, choices, first_line
from fcl_bench.files import replacing
from fcl_bench.leaderboard.track import Track, family_of, title_of, without_paths
from fcl_bench.results.best import stored_shares
from fcl_bench.results.collect import measured
from fcl_bench.results.reference import folder as results_folder


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


#: The measures of a row, by the names of `results.measures`, beside the accuracy after each task.
MEASURED = (
    *("A_T", "A_avg", "forgetting", "A_T_aware", "up_total_max_mib", "down_max_mib", "client_storage_mib"),
    *("client_samples_kept", "revealed_percent", "client_gradient_steps", "client_seconds", "server_seconds"),
)
#: Columns before those of the setting, and after them; measures stand in between.
_WHO = ("method", "kind", "request")
_WHAT = ("rounds", "first_samples", "accuracy", "gates", "gate_texts", "total_seconds", "run_id", "git_commit")


class Store:
    """The rows of one track, and what else its page says.

    Args:
        folder: of the files.
        track: the track's name.

    Attributes:
        rows: one mapping per run.
        about: the YAML file: the track as it was run, and `methods` with their titles and families; `data`, their
            fingerprint; `shared`, what all methods share in each setting; `tuned`, method -> its search; `not_run`,
            method -> why; `date` of the latest row.
        answers: which test samples each run classifies rightly.

    Raises:
        UserError: a file is damaged, or not as `save` writes it.
    """

    def __init__(self, folder: Path, track: str) -> None:
        self._path = folder / track
        path = self._path if self._path.with_suffix(".csv").is_file() else published() / track
        self.rows: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {"tuned": {}, "not_run": {}}
        if path.with_suffix(".csv").is_file():
            self.rows, self.about = _read(path)
        try:
            self.answers = Answers(path.with_suffix(".npy"))
        except (OSError, ValueError, TypeError, EOFError) as error:
            raise UserError(f"{path}.npy is damaged: {first_line(error)}", "a copy of it, or another --out") from error

    def describe(self, track: Track, methods: Iterable[str]) -> None:
        """Note what the rows are of, and the names of methods; rows of another version of the track go."""
        if self.about.get("version", track.version) != track.version:
            self.rows, self.about = [], {"tuned": {}, "not_run": {}}
        self.about |= {"track": track.name, "version": track.version, "about": track.about}
        self.about |= {"settings": track.settings, "seeds": track.seeds}
        if track.typed or "typed" not in self.about:  # where nothing is left to run, nobody need name the data
            self.about["typed"] = without_paths(track.typed)
        named = self.about.setdefault("methods", {})
        named |= {method: {"title": title_of(method), "family": family_of(method)} for method in methods}

    def save(self) -> None:
        """Write the files, each whole or not at all; the order of the rows does not depend on that of the runs."""
        settings = list(self.about["settings"][0])
        names = [*_WHO, *settings, "seed", *MEASURED, *_WHAT]
        self.rows.sort(key=lambda row: [_rank(row[name]) for name in (*_WHO[:2], *settings, "seed")])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for part in ("methods", "tuned", "not_run"):
            self.about[part] = dict(sorted(self.about[part].items()))
        # The rows come last, so that whoever finds them finds the other files, too.
        self.answers.save(self._path.with_suffix(".npy"), [row["run_id"] for row in self.rows])
        with replacing(self._path.with_suffix(".yaml")) as new:
            new.write_text(yaml.safe_dump(self.about, sort_keys=False, width=120))
        with replacing(self._path.with_suffix(".csv")) as new, new.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _written(row[name]) for name in names} for row in self.rows)

    def row(self, method: str, kind: str, request: str, setting: Mapping[str, str], seed: int) -> dict[str, Any] | None:
        """The row of a run; None if there is none, its method had other knobs, or it lacks answers that others have."""
        wanted = {"method": method, "kind": kind, "request": request, **setting, "seed": str(seed)}
        found = (row for row in self.rows if all(str(row[key]) == value for key, value in wanted.items()))
        keeps = any(shared.get("predictions") for shared in self.about.get("shared", []))
        return next((row for row in found if not keeps or row["run_id"] in self.answers), None)

    def put(self, row: dict[str, Any]) -> None:
        """Add the row of a run, in the place of an older one of the same run."""
        self.about["date"] = str(datetime.date.today())
        same = ("method", "kind", *self.about["settings"][0], "seed")
        self.rows = [other for other in self.rows if any(str(other[key]) != str(row[key]) for key in same)] + [row]

    def keep(self, method: str, kind: str, request: str) -> None:
        """Drop the rows of a method that were made with other knobs: no mean may mix them with the new ones."""
        self.rows = [
            row for row in self.rows if (row["method"], row["kind"]) != (method, kind) or row["request"] == request
        ]

    def tuned(self, method: str) -> dict[str, str]:
        """The knobs that a method's search chose, as typed; none where there was no search, or nothing to choose."""
        return dict(self.about["tuned"].get(method, {}).get("knobs", {}))

    def require_data(self, fingerprint: str) -> None:
        """Raise a `UserError` if the rows are of other data than these."""
        if self.about.setdefault("data", fingerprint) != fingerprint:
            raise UserError(
                f"these data ({fingerprint}) are not those of the rows that are there ({self.about['data']})",
                "the track's own data, or a track of your own under another name",
            )


def published() -> Path:
    """The folder of the rows that the package, or a checkout, brings."""
    return results_folder() / "leaderboard"


def stored(track: str, folder: Path) -> Store:
    """The rows of a track, a user's or those that came with the package. Raises a `UserError` if there are none."""
    store = Store(folder, track)
    if not store.rows:
        there = sorted({file.stem for place in (folder, published()) for file in place.glob("*.csv")})
        raise UserError(f"track {track} has no rows in {folder}", choices(there, track) if there else "run it first")
    return store


def row_of(record: Mapping[str, Any], uploads: Path) -> dict[str, Any]:
    """The part of a row that a complete run says.

    Args:
        record: its run.json.
        uploads: its uploads.csv, which has the rounds.
    """
    found, commit = measured(record), record["environment"]["git_commit"] or "unknown"
    texts = {gate["gate"]: f"task {gate['task'] + 1}: {gate['text']}" for gate in record["gates"]}
    with uploads.open(newline="") as file:
        rounds = {(row["task"], row["round"], row["stage"]) for row in csv.DictReader(file)}
    with uploads.with_name("tasks.csv").open(newline="") as file:
        first = next(csv.DictReader(file))["test_samples"]
    return {
        # As floats, as they are read again.
        **{name: None if found[name] is None else float(found[name]) for name in MEASURED},
        "rounds": len(rounds),
        "first_samples": int(first),
        "accuracy": record["metrics"]["accuracy"],
        "gates": sorted(texts),
        "gate_texts": "; ".join(texts[gate] for gate in sorted(texts)),
        "total_seconds": record["runtime"]["total_seconds"],
        "run_id": record["run_id"],
        "git_commit": commit[:12] + "-dirty" * commit.endswith("-dirty"),
    }


def _written(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_written, value))
    return "" if value is None else str(value)


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a CSV file, and the YAML file beside it."""
    try:
        with path.with_suffix(".csv").open(newline="") as file:
            rows = [_row(row) for row in csv.DictReader(file)]
        about = yaml.load(path.with_suffix(".yaml").read_text(), Loader=YAML_LOADER)
        if missing := {"version", "settings", "seeds", "methods", "tuned", "not_run"} - about.keys():
            raise ValueError(f"no {min(missing)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error, yaml.YAMLError) as error:
        what = f"{path}.csv and {path.name}.yaml are damaged: {first_line(error)}"
        raise UserError(what, "a copy of both, or another --out") from error
    return rows, about


def _row(row: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = dict(row)
    for name in (*MEASURED, "total_seconds"):
        found[name] = float(row[name]) if row[name] else None
    for name in ("seed", "rounds", "first_samples"):
        found[name] = int(row[name])
    found |= {"accuracy": [float(part) for part in row["accuracy"].split()], "gates": row["gates"].split()}
    if not all(map(math.isfinite, [found["A_T"], found["A_avg"], found["total_seconds"], *found["accuracy"]])):
        raise ValueError(f"a number of {found['run_id']} is not finite")
    return found


def _rank(value: Any) -> tuple[float, str]:
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), str(value)
