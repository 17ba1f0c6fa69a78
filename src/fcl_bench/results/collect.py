"""Run folders as one data frame: one row per run, with its configuration and its results."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fcl_bench.config import NEUTRAL, number_text, text
from fcl_bench.engine.transport import SYNCHRONOUS
from fcl_bench.errors import UserError, choices
from fcl_bench.execution.folder import SCHEMA, RunFolder
from fcl_bench.files import content_hash, read_json, regular, replacing
from fcl_bench.results.measures import MEASURES, SERIES, ByTask, by_task

log = logging.getLogger(__name__)

#: Columns that tell runs of one configuration apart. Every other column is a measure or part of the configuration.
RUN_COLUMNS = (
    *("seed", "run_id", "folder", "path", "profile", "experiment", "track", "evaluate_rounds", "git_commit", "written"),
    *("gates", "gate_texts", "first_task", "first_samples"),
)

#: The parts of the configuration that the record holds; knobs of a group's choice that matter are columns too.
_RECORDED = ("data", "backbone", "split", "partition", "beta", "clients", "tasks")
#: Keys of config.yaml that do not affect the result, or that the record has in the form that was used.
_GROUPS = ("split", "partition", "adapt", "faults", "noise", "secure")
_BESIDE = ("drift", "evaluate_rounds", "predictions", "experiment", "track", "profile")
#: Keys of a transport that say how its processes find each other.
_MEETING = ("transport.link", "transport.ca", "transport.withdrawal", "transport.every")
_NEITHER = ("transport", "device", "threads", "out", "force", "preview", "cache", "checkpoint_rounds", *_BESIDE)
_LEFT_OUT = {*_RECORDED, "method", "seed", *_NEITHER}
#: How many mixed values a message lists, and how many characters of each: a whole git commit with "-dirty" after it, so
#: that `--where` takes what is shown.
_VALUES, _SHOWN = 4, 46
#: What a run without a known revision of the code has as its `git_commit`, in messages and in conditions.
_UNKNOWN = "unknown"
#: What reading files raises that are sealed, and no run's.
_FOREIGN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration, yaml.YAMLError)
#: The files that are read here and by the code that draws the runs.
_READ = {"config.yaml", "tasks.csv", "uploads.csv", "rounds.csv", "accuracy_matrix.csv", "task_aware_matrix.csv"}
_READ |= {"predictions.parquet"}
#: The rows of an earlier call, beside the runs; what a row's stamp looks at; how many bytes at the end of run.json.
_INDEX, _STAMPED, _SEAL = ".index.json", {"run.json", *_READ}, 64


def collect(runs: Path, measures: Collection[str] = ()) -> pd.DataFrame:
    """Return every complete, undamaged run in the folder `runs`, one row each.

    Damaged runs, and those of another version of the run folder, are left out with a warning each.

    Besides `RUN_COLUMNS` and `MEASURES`, the columns are `method`, its knobs as `method.<knob>` with
    `method.revision`, and the setting: what the record and `config.yaml` say about data, stream, partition, number
    types and device, with fingerprints of data and features. A null is the text "null"; a key that a run lacks, and the
    beta of a partition without one, is NaN.

    Args:
        runs: the folder that holds the run folders.
        measures: names of measures; those of a single task (`S_3`) become columns too.
    """
    single = [name for name in measures if by_task(name)]
    known, rows = {} if single else _indexed(runs), {}
    for name in sorted(os.listdir(runs)) if runs.is_dir() else ():
        if not os.path.exists(f"{runs}/{name}/run.json"):
            continue
        stamp = _stamp(f"{runs}/{name}")
        if stamp and name in known and known[name][0] == stamp:
            rows[name] = known[name]
            continue
        folder = runs / name
        record = RunFolder(folder).complete_record(otherwise="leaving it out", read=_READ)
        if record is None:
            continue
        try:
            row = run_row(folder, record, single)
            # A measure that is no number would end the frame of all runs.
            numbers = {key: float(row[key]) for key in MEASURES if row.get(key) is not None}
            rows[name] = [stamp, row | numbers]
        except _FOREIGN as error:
            log.warning("run folder %s is in another form: %r; leaving it out", folder, error)
    if not single and rows != known:
        try:
            with replacing(runs / _INDEX) as temporary:
                temporary.write_text(json.dumps([_code(), rows]))
        except OSError as error:  # of somebody else's folder
            log.debug("no index of %s: %s", runs, error)
    return frame_of([row | {"path": str(runs / name)} for name, (_, row) in rows.items()], single)


def _indexed(runs: Path) -> dict[str, list[Any]]:
    """Name of a run's folder -> its stamp and row, as an earlier call of this version of the code left them."""
    try:
        code, found = json.loads(regular(runs / _INDEX).read_text())
        return {name: [stamp, {**row}] for name, (stamp, row) in found.items()} if code == _code() else {}
    except (OSError, ValueError, TypeError, AttributeError):  # of no index, or of JSON in another form
        return {}


def _stamp(folder: str) -> list[Any]:
    """The name, size and time of each file that a row is made from, and run.json's seal; [] if one cannot be read."""
    try:
        files = [(file.name, file.stat()) for file in os.scandir(folder) if file.name in _STAMPED]
        with open(regular(f"{folder}/run.json"), "rb") as file:
            seal = file.read()[-_SEAL:].decode(errors="replace")
        return [*sorted([name, status.st_size, status.st_mtime_ns] for name, status in files), seal]
    except OSError:
        return []


def _code() -> str:
    """A hash of the code that makes a row, and of the version of the run folders that it reads."""
    here = Path(__file__).parent
    files = [Path(__file__), here / "measures.py", here / "measures.yaml"]
    return content_hash(b"".join([b"%d" % SCHEMA, *(file.read_bytes() for file in files)])).hexdigest()


def run_row(folder: Path, record: Mapping[str, Any], single: Collection[str] = ()) -> dict[str, Any]:
    """Return one run's row of `collect`.

    Args:
        folder: the run's folder.
        record: the run's run.json.
        single: names of measures of a single task.
    """
    run = {"seed": record["seed"], "run_id": record["run_id"], "folder": folder.name, "path": str(folder)}
    run |= {"profile": record["profile"], "experiment": record["experiment"], "track": record["track"]}
    run |= {"evaluate_rounds": (record["rounds"] or {}).get("every", 0)}
    run |= {"git_commit": record["environment"]["git_commit"]}
    with (folder / "tasks.csv").open(newline="") as file:
        first_samples = int(next(csv.DictReader(file))["test_samples"])
    # Of a gate that is met after several tasks, the last text.
    texts = {found["gate"]: f"{found['gate']} (task {found['task'] + 1}): {found['text']}" for found in record["gates"]}
    run |= {"gates": ", ".join(sorted(texts)), "gate_texts": "; ".join(texts[gate] for gate in sorted(texts))}
    run |= {"first_task": record["metrics"]["accuracy"][0], "first_samples": first_samples}
    run |= {"written": (folder / "run.json").stat().st_mtime}
    return {**configuration(record, RunFolder(folder).config()), **measured(record, single), **run}


def frame_of(rows: list[dict[str, Any]], single: Collection[str] = ()) -> pd.DataFrame:
    """Return rows of `run_row` as a frame; measures are floats, NaN where a row has none."""
    # The columns are objects, so that an integer stays one in a column where other runs have no value.
    frame = pd.DataFrame(rows, dtype=object)
    return frame.astype({name: float for name in (*MEASURES, *single) if name in frame}).copy() if rows else frame


def selected(frame: pd.DataFrame, conditions: list[str]) -> pd.DataFrame:
    """Return the runs that meet all of `conditions` (key=value, or key=value,value; a list in brackets is one value).

    A key is a column of `frame` or any other key of run.json, such as `environment.torch`. A condition on a knob does
    not affect methods without it: method.rank=16 keeps STSA, which has no rank.

    Raises:
        UserError: nothing has the key, or no run has the value.
    """
    known = [column for column in frame if column not in (*MEASURES, "written", "path") and not by_task(column)]
    records: pd.DataFrame | None = None
    for condition in conditions:
        key, _, wanted = condition.partition("=")
        if not wanted or not key:
            raise UserError(f"--where {condition} is not KEY=VALUE", "such as --where method=fedran,stsa")
        if key in known:
            column = frame[key]
        else:
            records = _records(frame) if records is None else records
            if key not in records:
                raise UserError(f"--where {condition}: unknown key {key}", choices(known, key, most=len(known)))
            column = records[key].reindex(frame.index)
        there = column.map(text)
        if key == "git_commit":
            there = there.replace("", _UNKNOWN)
        values = _values(wanted, set(there))
        for value in values:
            if value not in set(there):
                raise UserError(f"--where {condition}: no run has {key}={value}", choices(set(there) - {""}, value))
        frame = frame[there.isin(values) | (key.startswith("method.") & (there == ""))]
    return frame


def _values(wanted: str, there: Collection[str]) -> list[str]:
    """Return the values of a condition, as tables write them; commas within a value or a list's brackets do not part.

    Args:
        wanted: as the user typed it.
        there: the values that runs have.
    """
    typed = [wanted] if wanted in there else re.split(r",(?![^\[]*\])", wanted)
    return [value if value in there else _list_text(value) or number_text(value) for value in typed]


def _list_text(value: str) -> str:
    """Return a list as tables write it, whatever its spaces; "" for what is no list."""
    try:
        found = json.loads(value) if value.startswith("[") else None
    except ValueError:
        return ""
    return "" if found is None else json.dumps(found)


def _records(frame: pd.DataFrame) -> pd.DataFrame:
    """Return all keys of the runs' run.json, nested ones with dots, on the index of `frame`; references have none."""
    rows = [dict(_flat(read_json(Path(path, "run.json")))) if path else {} for path in frame["path"]]
    return pd.DataFrame(rows, frame.index, dtype=object)


def of_sweep(frame: pd.DataFrame, out: Path, sweep: str) -> pd.DataFrame:
    """Return the runs of one sweep in `<out>/sweeps`: those that it carried out, and those that it found complete.

    Args:
        sweep: the name of the sweep's folder; "" means the latest sweep that has a complete run.

    Raises:
        UserError: there is no such sweep, or none of its runs is there.
    """
    folders = [path for path in (out / "sweeps").glob("*") if (path / "jobs").is_dir()]
    folders.sort(key=lambda path: (path / "jobs").stat().st_mtime, reverse=True)
    names = [path.name for path in folders]
    if not folders:
        raise UserError(f"{out / 'sweeps'} holds no sweep", "fcl-bench -m ... makes one, --out names its folder")
    if sweep and sweep not in names:
        raise UserError(f"--sweep {sweep} is not in {out / 'sweeps'}", choices(names, sweep, most=8))
    for folder in [out / "sweeps" / sweep] if sweep else folders:
        found = frame[frame["folder"].isin(_runs_of(folder))]
        if len(found):
            return found
    option = f"--sweep {sweep}" if sweep else "--latest"
    raise UserError(f"{option}: no complete run of it is in {out / 'runs'}", "the same sweep again, or another --out")


def _runs_of(sweep: Path) -> set[str]:
    """Return the names of the run folders in a sweep's reports."""
    reports = (json.loads(path.read_text()) for path in (sweep / "jobs").glob("[0-9]*.json"))
    return {Path(report["run"]).name for report in reports if report.get("run")}


def mixed(frame: pd.DataFrame) -> list[str]:
    """Return one line for each of profile, device and code revision that is mixed, with how to select one value."""
    lines = []
    for what, key in (("profiles", "profile"), ("devices", "device"), ("code revisions", "git_commit")):
        count = frame[key].map(lambda value: text(value) or _UNKNOWN).value_counts(sort=False)
        if len(count) > 1:
            listed = ", ".join(f"{str(value)[:_SHOWN]} ({runs})" for value, runs in list(count.items())[:_VALUES])
            more = f" and {len(count) - _VALUES} more" if len(count) > _VALUES else ""
            lines.append(f"These runs mix {what}: {listed}{more}; --where {key}=VALUE takes one.")
    return lines


def configuration(record: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return what determines a run's result, from its run.json and config.yaml, but for its seed."""
    features = content_hash(json.dumps(_features(record, config), sort_keys=True).encode())
    return {
        "method": record["method"],
        **dict(_flat(config.get("method", {}), "method.")),
        # The revision is text: it tells versions of the code apart and is not a quantity.
        "method.revision": str(record["method_revision"]),
        **{key: record[key] for key in _RECORDED},
        **({"beta": math.nan} if record["beta"] is None else {}),  # a partition without beta has null
        **{key: record[key] for key in ("adapt", "faults", "noise", "secure", "protocol")},
        **dict(_flat({key: value for key, value in config.items() if _counts(key, value)})),
        "device": record["environment"]["device"],
        **{
            key: value
            for group in _GROUPS
            for key, value in _flat(config.get(group, {}), f"{group}.")
            # The record has the first as `beta`; runs from before there was `split.order` have none, which is null.
            if key != "partition.beta" and (key, value) != ("split.order", "null")
        },
        **{
            key: value
            for key, value in _flat(config.get("transport", {}), "transport.")
            if key not in _MEETING and value not in ("null", SYNCHRONOUS)  # what all transports do
        },
        **_held_out(record["validation"]),
        "features": features.hexdigest()[:8],
        "data_fingerprint": record["data_fingerprint"][:8],
    }


def _counts(key: str, value: Any) -> bool:
    """Return whether a top-level entry of config.yaml is of the configuration."""
    return key not in (*_LEFT_OUT, *_GROUPS) and (key not in NEUTRAL or value != NEUTRAL[key])


def _held_out(validation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys that say what a run was tested on; none for a run on all training samples and the test set."""
    if validation is None:
        return {}
    return {"data.validation": validation["share"], "data.test": not validation["replaces_test"]}


def _features(record: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determines a run's features, the same for all seeds of one configuration."""
    identity = dict(record["features"])
    if record["draws_weights"]:
        identity.pop("weights", None)  # they differ between seeds, over which runs are averaged
        # The hash of all weights would name the source of those that are not drawn. An entry is added only where there
        # is a source, since the fingerprints of networks from scratch stand in the reference tables.
        if config["backbone"].get("pretrained"):
            identity["pretrained"] = True
        if record["checkpoint"]:
            identity["checkpoint"] = record["checkpoint"]
    precision = record["precision"]["features"]
    if record["adapt"] != "none" and precision not in (None, "float32"):
        # The features come from the adapted network, and `features` describes the one that adaptation began with.
        identity["precision"] = precision
    return identity


def measured(record: Mapping[str, Any], single: Collection[str] = ()) -> dict[str, Any]:
    """Return all `MEASURES` of a run record, and the measures of `single` tasks; None where one is not defined."""
    communication: Mapping[str, Any] = record["communication"]
    found = {**record["metrics"], **communication["accounting"], **record["runtime"]}
    for way in ("up_max", "down_max", "up_total_max"):
        found[f"{way}_mib"] = communication[f"{way}_bytes"] / 2**20
    found["peak_memory_mib"] = record["runtime"]["peak_memory_bytes"] / 2**20
    found["client_storage_mib"] = record["client_storage_max_bytes"] / 2**20
    found["client_samples_kept"] = record["client_samples_kept"]
    if raw := communication["raw"]:
        found["raw_mib"] = raw["busiest_bytes"] / 2**20
        found["times_raw"] = communication["up_total_bytes"] / raw["total_bytes"] if raw["total_bytes"] else None
    privacy: Mapping[str, Any] = record["privacy"]
    found |= {**privacy, **record["compute"]}
    found["epsilon"] = (privacy["guarantee"] or {}).get("epsilon")
    found["revealed_percent"] = 100 * privacy["revealed_samples"] / record["labels"]["samples"]
    tasks = record["tasks"]
    found |= {last: ByTask(last, tasks).of(record) for last in SERIES}
    found |= {name: ByTask.of(entry, record) for name in single if (entry := by_task(name))}
    found["A_T_aware"] = record["task_aware"]["A_T"]
    if rounds := record["rounds"]:
        found["A_T_best"] = rounds["best"][-1]
    if routing := record["routing"]:
        found["A_T_unrouted"] = routing["unrouted"]["A_T"]
    if adaptation := record["adaptation"]:
        found["adapt_up_mib"] = adaptation["up_max_bytes"] / 2**20
    return {measure: found.get(measure) for measure in (*MEASURES, *single)}


def _flat(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `{"wire": {"dtype": "float32"}}` as ("wire.dtype", "float32"); the class that a group names is left out."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", json.dumps(value) if isinstance(value, list) or value is None else value
