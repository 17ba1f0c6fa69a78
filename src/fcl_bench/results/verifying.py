"""Recomputes what a complete run says of itself from what its folder stores, and names what contradicts it.

Answers, tables, exchanges, model and record say the same things several times, so that an edit of a few files is found,
however well the record is sealed again. A folder that was made up as a whole is not: its files agree with each other.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf

from fcl_bench.config import Settings, load_settings
from fcl_bench.data.splits.base import columns_of
from fcl_bench.engine.codec import RawSamples
from fcl_bench.engine.evaluation import CONFUSION, best_rounds
from fcl_bench.engine.ledger import NOBODY_KNOWS, Ledger
from fcl_bench.engine.metrics import accuracy_matrix, class_accuracy, metrics
from fcl_bench.errors import UserError, first_line
from fcl_bench.execution.adapt import STAGE
from fcl_bench.execution.folder import RunFolder, run_id
from fcl_bench.execution.model_file import read_model, tasks_of
from fcl_bench.execution.plan import context_of
from fcl_bench.execution.record import configured, last_drift, over_clients, routed, task_table

#: The most differences that one check lists.
_LISTED = 3
#: The files with which the others are compared, the likeliest to be asked for first.
_SAMPLES, _CONFUSION, _MODEL = "predictions.parquet", "confusion.npz", "model.safetensors"
#: Keys of run.json that the checksums or the id cover.
_COVERED = ("schema", "files", "checksum", "data_fingerprint", "features")
#: What reading files that agree in form with no run raises.
_FOREIGN = (UserError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, zipfile.BadZipFile)


class Check(NamedTuple):
    """One thing that a run says, and whether its other files say the same.

    Attributes:
        what: a file, or a key of run.json.
        source: what it was recomputed from.
        wrong: the differences in words, none for what is right.
    """

    what: str
    source: str
    wrong: list[str]


class Verified(NamedTuple):
    """What was found of a run.

    Attributes:
        checks: all comparisons.
        unchecked: the keys of run.json (nested ones with dots) that follow from nothing else in the folder.
        record, settings: run.json, and what config.yaml says; None where they cannot be read.
    """

    checks: list[Check]
    unchecked: list[str]
    record: dict[str, Any] | None = None
    settings: Settings | None = None

    @property
    def wrong(self) -> list[Check]:
        """The checks that found a difference."""
        return [check for check in self.checks if check.wrong]


def verify(path: Path, read: Container[str] | None = None) -> Verified:
    """Compare everything in a run's folder that can be recomputed with what the run says.

    Args:
        path: the folder of a complete run.
        read: the files whose checksums are verified; None: all.
    """
    record, trouble = RunFolder(path).checked(read=read)
    checks = [Check("checksums", "the files", [f"the folder{trouble}"] if trouble else [])]
    if record is None:
        return Verified(checks, [])
    recomputed, whole, settings = dict.fromkeys(_COVERED), dict(record), None
    try:
        stored = _Stored(path, whole)
        settings = stored.settings
        for what, source, found, wanted in stored.claims():
            checks.append(Check(what, source, _shortened(list(_differences(found, wanted, what)))))
            recomputed |= wanted if found is whole else {what: wanted}
    except _FOREIGN as error:
        checks.append(Check("the folder", "its files", [f"cannot be read as a run's: {first_line(error)}"]))
    return Verified(checks, _unchecked(whole, recomputed), whole, settings)


def settings_in(config: Mapping[str, Any]) -> Settings:
    """Return the settings of a run's config.yaml; a checkpoint may no longer exist, and fingerprints tell its content.

    Raises:
        UserError: this version of fcl-bench has no such configuration.
    """
    backbone = {key: None if key == "checkpoint" else value for key, value in config["backbone"].items()}
    return load_settings(OmegaConf.create({**config, "backbone": backbone}))


#: What is claimed, what it is recomputed from, what the run says, what comes out.
_Claim = tuple[str, str, Any, Any]


class _Stored:
    """The files of a run's folder, read once, and what follows from them.

    Args:
        path: the folder.
        record: its run.json.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self._path, self._record = path, record
        self._config = RunFolder(path).config()
        self.settings = settings_in(self._config)
        self._about, _ = read_model(path / _MODEL, None)
        self._tasks = tasks_of(self._about)
        self._recurring = any(len(task.columns) > len(task.classes) for task in self._tasks)
        with np.load(path / "partition.npz") as file:
            self._partition = {name: file[name] for name in file.files}
        self._tests = self._sizes("test" if self.settings.held_out.test else "validation")

    def claims(self) -> Iterator[_Claim]:
        yield from self._of_config()
        if _SAMPLES in self._record["files"]:
            yield from self._of_samples()
        yield from self._of_answers()
        yield from self._of_matrices()
        yield from self._of_exchanges()
        yield from self._of_tables()

    def _of_config(self) -> Iterator[_Claim]:
        record, about = self._record, self._about
        data = {"data_fingerprint": record["data_fingerprint"], "device": record["environment"]["device"]}
        identity = {**self.settings.identity(), **data, "features": record["features"]}
        yield "run_id", "config.yaml, data_fingerprint, features and device", record["run_id"], run_id(identity)
        network = {"draws_weights": self.settings.backbone.draws_weights}
        network |= {"weights": about["weights"] or record["features"].get("weights")}
        yield "run.json", f"config.yaml and {_MODEL}", record, {**configured(self.settings), **network}
        same = ("run_id", "method", "data", "backbone", "seed", "clients", "features")
        known = {**{key: record[key] for key in same}, "labels": self._partition["class_order"].tolist()}
        known["settings"] = {key: self._config[key] for key in ("method", "adapt")}
        yield _MODEL, "run.json, config.yaml and partition.npz", about, known
        trained = sum(self._held())
        if trained:  # samples that stay at their sites are in no partition.npz
            yield "class_samples", "partition.npz", sum(record["class_samples"]), trained

    def _of_samples(self) -> Iterator[_Claim]:
        """Compare answers to single samples with the counts of answers, and the samples with those that were tested."""
        rows, order = self._samples, self._partition["class_order"]
        columns = {name: columns_of(rows[name].to_numpy(), order) for name in ("label", "prediction")}
        found = rows.assign(**columns).groupby(["after", *columns]).size().reset_index().to_numpy()
        yield _CONFUSION, _SAMPLES, self._counts.to_numpy(), found
        tested = [(self._task_of >= 0) & (self._task_of <= task) for task in range(len(self._tasks))]
        wanted = [np.stack([np.full(own.sum(), task), np.flatnonzero(own)], axis=1) for task, own in enumerate(tested)]
        have = rows[["after", "sample"]].sort_values(["after", "sample"]).to_numpy()
        yield _SAMPLES, "partition.npz", have, np.concatenate(wanted)
        labels = rows[["sample", "label"]].drop_duplicates()
        yield f"labels in {_SAMPLES}", "its other tasks", len(labels), rows["sample"].nunique()

    def _of_answers(self) -> Iterator[_Claim]:
        source, counts = self._source, self._counts
        compared = [self._by_task(counts), np.tri(len(self._tasks)) * self._tests, self._hits(), self._correct]
        if self._recurring:  # a class is in several tasks: only the sums over tasks are sure
            compared = [part.sum(axis=1) for part in compared]
        yield f"samples in {_CONFUSION}", "partition.npz", *compared[:2]
        yield f"right answers in {_CONFUSION}", source, *compared[2:]
        matrix = accuracy_matrix(self._correct, self._tests)
        yield "accuracy_matrix.csv", source, self._matrix("accuracy_matrix.csv"), matrix
        by_class = class_accuracy(counts.to_records(index=False), len(self._tasks), len(self._partition["class_order"]))
        yield "class_accuracy.csv", _CONFUSION, self._matrix("class_accuracy.csv"), by_class
        yield "metrics", source, self._record["metrics"], metrics(self._correct, self._tests)

    def _of_matrices(self) -> Iterator[_Claim]:
        """Compare with matrices whose answers are not stored: they hold whole numbers of samples at least."""
        record, held, tests = self._record, self.settings.held_out, self._tests
        for file, key, measure in (("task_aware", "task_aware", metrics), ("routing", "routing", routed)):
            if f"{file}_matrix.csv" in record["files"] or record[key]:
                yield self._whole(f"{file}_matrix.csv", tests)
                correct = self._whole_numbers(f"{file}_matrix.csv", tests)
                yield key, f"{file}_matrix.csv", record[key], measure(correct, tests)
        sizes = self._sizes("validation")
        wanted: dict[str, Any] = {"share": held.validation, "samples": int(sizes.sum()), "replaces_test": not held.test}
        wanted["metrics"] = self._validated and metrics(*self._validated)
        yield (
            "validation",
            "config.yaml, partition.npz and validation_matrix.csv",
            record["validation"],
            wanted if held.validation else None,
        )
        if self._validated:
            yield self._whole("validation_matrix.csv", sizes)

    def _whole(self, file: str, sizes: np.ndarray) -> _Claim:
        wanted = accuracy_matrix(self._whole_numbers(file, sizes), sizes)
        return file, "partition.npz, in whole samples", self._matrix(file), wanted

    @cached_property
    def _validated(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Right answers (T, T) and numbers (T,) of validation samples that were asked about beside the test's."""
        if not self.settings.held_out.validation or not self.settings.held_out.test:
            return None
        sizes = self._sizes("validation")
        return self._whole_numbers("validation_matrix.csv", sizes), sizes

    def _of_exchanges(self) -> Iterator[_Claim]:
        record, source, scalars = self._record, "uploads.csv", self.settings.scalars
        uploads, tasks = self._table("uploads.csv"), self._table("tasks.csv")
        first = uploads["stage"] == STAGE
        context = context_of(self.settings, self._about["dimension"], torch.device("cpu"), self._recurring)
        context = dataclasses.replace(context, classes=self._tasks[-1].columns_seen)
        ledger = self._ledger(
            uploads[~first], record["communication"]["raw"], tasks["server_seconds"].tolist(), context
        )
        wanted: dict[str, Any] = {**ledger.communication(), "wire": dataclasses.asdict(scalars.wire)}
        if not self.settings.method.trains_network:
            classes = [len(task.columns) for task in self._tasks]
            wanted["accounting"] = self.settings.method.paper_bytes(context, classes)
        yield "communication", f"{source} and config.yaml", record["communication"], wanted
        yield "labels", source, record["labels"], {"rate": scalars.label_rate, **ledger.labels()}
        yield "runtime", f"{source} and tasks.csv", record["runtime"], ledger.runtime()
        dropped, sent = ledger.dropped(), None
        if first.any():
            stage = self._ledger(uploads[first], record["adaptation"]["raw"], [], context)
            dropped += stage.dropped()
            sent = {name: size for name, size in stage.communication().items() if name != "by_stage"}
        yield "adaptation", source, record["adaptation"], sent
        who = {"uploads": len(dropped), "clients": sorted({client for client, _ in dropped})}
        yield "dropped", source, record["dropped"], who
        counted = {name: n for name, n in ledger.single_samples().items() if name != "revealed_samples"}
        yield "privacy", source, record["privacy"], counted
        held = self._held() if sum(self._held()) else tasks["train_samples"].tolist()
        scores = metrics(self._correct, self._tests)
        header, rows = task_table(self._tasks, ledger, held, self._tests, scores, self._validated)
        table = pd.DataFrame([list(row) for row in rows], columns=list(header), dtype=object)
        yield "tasks.csv", f"{source}, partition.npz and {self._source}", _cells(tasks), _cells(table)

    def _ledger(self, uploads: pd.DataFrame, raw: Any, server_seconds: list[float], context: Any) -> Ledger:
        cost = None if raw is None else RawSamples("images", raw["sample_bytes"])
        if raw is not None and raw["kind"] == "features":
            cost = RawSamples.of(torch.empty(0, self._about["dimension"]), context.wire)
        ledger = Ledger(self.settings.scalars.clients, cost)
        uploads = uploads.fillna({"right": NOBODY_KNOWS}).sort_values("task", kind="stable")  # open rounds mix tasks
        for (task, stage), rows in uploads.groupby(["task", "stage"], sort=False):
            ledger.add_round(task, rows["round"].to_numpy(), stage, {name: rows[name].to_numpy() for name in rows})
        ledger.server_seconds = server_seconds
        return ledger

    def _of_tables(self) -> Iterator[_Claim]:
        """Compare the summaries of tables that only some runs have; without the table, there is no summary."""
        tasks, every = len(self._tasks), self.settings.scalars.evaluate_rounds
        summaries: dict[str, tuple[str, Callable[[str], Any]]] = {
            "client_accuracy": ("client_accuracy.csv", lambda file: over_clients(self._matrix(file)[:, -1])),
            "rounds": ("rounds.csv", lambda file: best_rounds(every, tasks, *self._matrix(file)[:, :3].T)),
            "bounds": ("bounds.csv", self._rows),
            "drift": ("drift.csv", lambda file: last_drift(self._rows(file), tasks)),
        }
        for key, (file, summary) in summaries.items():
            stored = file in self._record["files"]
            yield key, file, self._record[key] or None, summary(file) if stored else None

    @cached_property
    def _counts(self) -> pd.DataFrame:
        """The counts of answers: after, label, answer, samples."""
        with np.load(self._path / _CONFUSION) as file:
            return pd.DataFrame({name: file[name] for name in CONFUSION.names or ()})

    def _by_task(self, counts: pd.DataFrame) -> np.ndarray:
        """(T, T) how many samples some of the counts have, after each task, in classes that were new in each task."""
        task_of = np.repeat(np.arange(len(self._tasks)), [len(task.classes) for task in self._tasks])
        found = np.zeros((len(self._tasks), len(self._tasks)), dtype=np.int64)
        np.add.at(found, (counts["after"], task_of[counts["label"]]), counts["samples"])
        return found

    def _hits(self) -> np.ndarray:
        return self._by_task(self._counts[self._counts["label"] == self._counts["answer"]])

    @cached_property
    def _samples(self) -> pd.DataFrame:
        return pd.read_parquet(self._path / _SAMPLES)

    @cached_property
    def _task_of(self) -> np.ndarray:
        """The task of each sample of the tested side, -1 for one of none."""
        side = "test" if self.settings.held_out.test else "validation"
        own = [self._partition[f"{side}_t{task}"] for task in range(len(self._tasks))]
        found = np.full(1 + max((int(part.max(initial=-1)) for part in own), default=-1), -1)
        for task, part in enumerate(own):
            found[part] = task
        return found

    @cached_property
    def _source(self) -> str:
        """The file with the answers that single samples got, or else with the most of them."""
        if _SAMPLES in self._record["files"]:
            return _SAMPLES
        return "accuracy_matrix.csv" if self._recurring else _CONFUSION

    @cached_property
    def _correct(self) -> np.ndarray:
        """(T, T) right answers on task tau's test set after task t, of `_source`."""
        if self._source == "accuracy_matrix.csv":
            return self._whole_numbers(self._source, self._tests)
        if self._source == _CONFUSION:
            return self._hits()
        correct = np.zeros((len(self._tasks), len(self._tasks)), dtype=np.int64)
        rows = self._samples[self._samples["label"] == self._samples["prediction"]]
        np.add.at(correct, (rows["after"], self._task_of[rows["sample"]]), 1)
        return correct

    def _sizes(self, side: str) -> np.ndarray:
        """(T,) how many samples of a side each task has."""
        return np.array([len(self._partition.get(f"{side}_t{task}", ())) for task in range(len(self._tasks))])

    def _held(self) -> list[int]:
        """(T,) how many training samples all clients have."""
        parts = [(name.split("_"), len(own)) for name, own in self._partition.items() if name.startswith("train_t")]
        return [sum(n for name, n in parts if name[1] == f"t{task}") for task in range(len(self._tasks))]

    def _whole_numbers(self, file: str, sizes: np.ndarray) -> np.ndarray:
        """(T, T) the right answers of which a matrix of a file has the percentages, of (T,) samples."""
        return np.rint(np.nan_to_num(self._matrix(file)) * sizes / 100).astype(np.int64)

    def _table(self, file: str) -> pd.DataFrame:
        return pd.read_csv(self._path / file, skip_blank_lines=False)

    def _matrix(self, file: str) -> np.ndarray:
        return self._table(file).to_numpy(float)

    def _rows(self, file: str) -> list[dict[str, Any]]:
        """Return a table's rows, None in empty cells."""
        columns = _cells(self._table(file))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cells(frame: pd.DataFrame) -> dict[str, list[Any]]:
    """Return a table's columns as lists, None in empty cells."""
    found: dict[str, list[Any]] = frame.astype(object).where(frame.notna(), None).to_dict("list")
    return found


def _differences(found: Any, wanted: Any, where: str) -> Iterator[str]:
    """Yield where `found` is not as `wanted`; of a mapping, only the keys that `wanted` has are compared.

    Numbers may differ by what another order of a sum rounds otherwise.
    """
    if isinstance(wanted, np.ndarray):
        if np.shape(found) != wanted.shape:
            yield f"{where} has the shape {np.shape(found)}, recomputed {wanted.shape}"
        elif len(odd := np.argwhere(~np.isclose(found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True))):
            yield from (f"{where}{at.tolist()} is {found[tuple(at)]}, recomputed {wanted[tuple(at)]}" for at in odd)
    elif isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key, value in wanted.items():
            yield from _differences(found.get(key), value, f"{where}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            yield from _differences(one, other, f"{where}[{place}]")
    elif isinstance(wanted, int | float) and isinstance(found, int | float):
        if not math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9):
            yield f"{where} is {found}, recomputed {wanted}"
    elif found != wanted:
        yield f"{where} is {found}, recomputed {wanted}"


def _shortened(wrong: list[str]) -> list[str]:
    more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
    return wrong[:_LISTED] + more


def _unchecked(value: Any, recomputed: Any, name: str = "") -> list[str]:
    """Return the parts of a record of which nothing was compared, and of the others the keys that were not.

    Args:
        value: the record, or a part of it.
        recomputed: what was recomputed of it.
        name: of the part.
    """
    if not isinstance(value, Mapping) or not isinstance(recomputed, Mapping):
        return []
    found = []
    for key, part in value.items():
        whole = f"{name}{key}"
        found += (
            _unchecked(part, recomputed[key], f"{whole}.") if key in recomputed else [] if part is None else [whole]
        )
    return found
