"""`fcl-bench rank`: where a run of one's own stands among the rows of a track."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fcl_bench.cli.command import DONE, Parser
from fcl_bench.composition import choices_of
from fcl_bench.config import text
from fcl_bench.errors import UserError, require_choice
from fcl_bench.files import user_path
from fcl_bench.tracking import flat

#: How many rows above and below the run's own are printed.
_AROUND = 4
#: Keys that change no number of a track, or whose values others have under a better name.
_NOT_SHARED = ("device", "predictions", "drift", "evaluate_rounds", "backbone._target_", "backbone.name")
#: What tables tell apart and a track's settings do not name.
_TOLD = ("features", "protocol")


class Standing(NamedTuple):
    """One row beside a user's runs.

    Attributes:
        label: the method, and whether its knobs were searched.
        accuracy: its A_T in percent; the mean of the seeds that both have.
        ahead: how much larger the user's A_T is in these seeds, in points.
        low, high: the ends of the 95 % interval of `ahead`; NaN with one seed.
        gates: that the row meets.
        competes: whether it has a place: ceilings and rows with a gate have none.
    """

    label: str
    accuracy: float
    ahead: float
    low: float
    high: float
    gates: str
    competes: bool


class Ranking(NamedTuple):
    """Where runs stand.

    Attributes:
        track: the version of the track.
        setting: the one of its settings that the runs have.
        accuracy: their mean A_T.
        place: 1 for the best.
        rows: the track's, the best first.
        differs: what else they do not have as the track has it: "label_rate: 0.5, the track has 1.0".
    """

    track: str
    setting: Mapping[str, str]
    accuracy: float
    place: int
    rows: list[Standing]
    differs: list[str]


def rank(*runs: str | Path, track: str = "", out: str | Path = "outputs/leaderboard") -> Ranking:
    """Compare runs of one method, one or more seeds, with the rows of a track.

    Args:
        runs: folders of complete runs.
        track: the track's name; "" takes the track that the runs were made for, or the one with their data.
        out: the folder of the track's rows; where it has none, those that came with the package.

    Raises:
        UserError: a run is damaged or unlike the others, or no track has its data.
    """
    # Imported only now, so that errors about wrong options are quick.
    from fcl_bench.execution.folder import RunFolder
    from fcl_bench.leaderboard.store import stored

    records = [(path, RunFolder(path).verified()) for path in map(Path, runs)]
    name = track or _track_of(records[0][1], Path(out))
    store = stored(name, Path(out))
    return _ranking(records, store)


def _track_of(record: Mapping[str, Any], out: Path) -> str:
    """The name of the track that a run was made for, or of the one whose rows have its data."""
    from fcl_bench.leaderboard.store import Store

    if recorded := record.get("track"):
        return str(recorded).rpartition("-")[0]
    fingerprint = record["data_fingerprint"]
    names = choices_of("track")
    found = next((name for name in names if Store(out, name).about.get("data") == fingerprint), None)
    if found is None:
        raise UserError(f"no track has rows of the data {fingerprint}", f"--track NAME, one of {', '.join(names)}")
    return found


def _ranking(records: Sequence[tuple[Path, Mapping[str, Any]]], store: Any) -> Ranking:
    from fcl_bench.leaderboard.board import repeats, results, rows_in
    from fcl_bench.leaderboard.store import right_of

    store.require_data(records[0][1]["data_fingerprint"])
    own: dict[int, tuple[float, str]] = {}
    for path, record in records:
        final, run_id = record["metrics"]["A_T"], record["run_id"]
        own[record["seed"]] = final, run_id
        store.answers.put(run_id, right_of(path, final))
    kinds = [_kind(path, record) for path, record in records]
    if any(kind != kinds[0] for kind in kinds) or len(own) < len(records):
        raise UserError("these runs differ in more than their seed", "runs of one method and setting, each seed once")
    unlike = [_differences(kinds[0], shared) for shared in store.about["shared"]]
    differs = min(unlike, key=len)
    number = unlike.index(differs)
    common = [row for row in rows_in(store, number) if own.keys() & results(row).keys() and not repeats(row)]
    standings = [_standing(own, row, store.answers.shares) for row in common]
    standings.sort(key=lambda standing: -standing.accuracy)
    place = 1 + sum(standing.ahead < 0 for standing in standings if standing.competes)
    accuracy = statistics.fmean(value for value, _ in own.values())
    return Ranking(store.about["version"], store.about["settings"][number], accuracy, place, standings, differs)


def _kind(path: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """What runs of one row have in common; from their files alone, since their classes take long to import."""
    from fcl_bench.execution.folder import RunFolder
    from fcl_bench.results.collect import configuration

    config = RunFolder(path).config()
    found = {**flat(config["backbone"], "backbone", "."), **configuration(record, config)}
    return {key: text(value) or "null" for key, value in found.items() if key not in _NOT_SHARED}


def _differences(kind: Mapping[str, str], shared: Mapping[str, Any]) -> list[str]:
    """What of a result of `_kind` is not as a track's settings have it (`track.shared_of`)."""
    names = {f"{key.removesuffix('.name')}.choice": value for key, value in shared.items() if key.endswith(".name")}
    theirs = {key.removesuffix(".choice"): text(value) or "null" for key, value in {**shared, **names}.items()}
    keys = [key for key in {**theirs, **kind} if key not in _NOT_SHARED and not key.startswith(("data", "method"))]
    pairs = {key: (kind.get(key, "null"), theirs.get(key, "null")) for key in keys if key not in _TOLD}
    return [f"{key}: {own}, the track has {other}" for key, (own, other) in pairs.items() if own != other]


def _standing(own: Mapping[int, tuple[float, str]], row: Mapping[str, Any], shares: Any) -> Standing:
    """A row beside the user's runs, in the seeds that both have."""
    from fcl_bench.leaderboard.board import label_of, results
    from fcl_bench.results.best import judged

    theirs = {seed: value for seed, value in results(row).items() if seed in own}
    mine, verdict = judged([{seed: own[seed] for seed in theirs}, theirs], "A_T", True, shares)
    ahead, low, high = verdict.behind, verdict.low, verdict.high
    if mine.behind:  # of the two, the row is the better one
        ahead, low, high = -mine.behind, -mine.high, -mine.low
    accuracy = statistics.fmean(value for value, _ in theirs.values())
    gates = ", ".join(row["gates"])
    return Standing(label_of(row), accuracy, ahead, low, high, gates, not (gates or row["ceiling"]))


def work(arguments: list[str]) -> int:
    """Print where runs stand. Raises a `UserError` as `rank` does, and for wrong options."""
    options = parsed(arguments)
    from fcl_bench.execution.folder import run_folder

    folders = [run_folder(given, options.out) for given in options.runs]
    _print(rank(*folders, track=options.track, out=user_path("--board", options.board)))
    return DONE


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="fcl-bench rank",
        description="Where runs of one method, one or more seeds, stand among the rows of a leaderboard's track.",
        epilog="example: fcl-bench rank outputs/runs/my_lda-features-identity-*",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder or id of a run")
    parser.add_argument("--track", default="", metavar="NAME", help="of these rows; default: those of the run's data")
    parser.add_argument("--out", default="outputs", metavar="FOLDER", help="where runs are looked for by id (outputs)")
    board = "the folder of the rows (outputs/leaderboard; those that came with fcl-bench)"
    parser.add_argument("--board", default="outputs/leaderboard", metavar="FOLDER", help=board)
    options = parser.parse_args(arguments)
    if options.track:
        require_choice("--track", options.track, choices_of("track"))
    return options


def _print(found: Ranking) -> None:
    """Print the rows around the runs' own place."""
    from rich.table import Table

    from fcl_bench.execution.screen import ScreenConsole

    console = ScreenConsole(highlight=False)
    count = sum(row.competes for row in found.rows)
    setting = ", ".join(f"{key} {value}" for key, value in found.setting.items())
    place = f"A_T {found.accuracy:.2f} %, place {found.place} of {count + 1}"
    console.print(f"{found.track}, {setting}: {place}", markup=False)
    for line in found.differs:
        console.print(f"not the track's setting: {line}", markup=False)
    table = Table("", "A_T (%)", "yours minus it", "95 % interval", "gates")
    above = [row for row in found.rows if row.ahead < 0]
    below = [row for row in found.rows if row.ahead >= 0]
    for row in above[-_AROUND:]:
        table.add_row(*_cells(row))
    table.add_row("your runs", f"{found.accuracy:.2f}", style="bold")
    for row in below[:_AROUND]:
        table.add_row(*_cells(row))
    console.print(table)
    more = len(above[:-_AROUND]), len(below[_AROUND:])
    if any(more):
        console.print(f"{more[0]} more rows above, {more[1]} below: fcl-bench leaderboard show TRACK", markup=False)


def _cells(row: Standing) -> tuple[str, ...]:
    interval = "one seed" if math.isnan(row.low) else f"{row.low:+.2f} to {row.high:+.2f}"
    return row.label, f"{row.accuracy:.2f}", f"{row.ahead:+.2f}", interval, row.gates
