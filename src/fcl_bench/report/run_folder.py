"""A run's folder: written whole or not at all, found again by its id, verified before it is trusted."""

from __future__ import annotations

import csv
import json
import logging
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fcl_bench.data.stream import Stream
from fcl_bench.federation.ledger import Ledger, Upload
from fcl_bench.files import content_hash, file_checksum, replacing

log = logging.getLogger(__name__)

#: Version of the run folder's files; part of the run id. What changes a method's numbers raises its `revision` instead.
SCHEMA = 2


def run_id(identity: dict[str, Any]) -> str:
    """Hash of everything that determines the result."""
    digest = content_hash()
    digest.update(json.dumps({"schema": SCHEMA, **identity}, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:12]


class RunFolder:
    """`<out>/runs/<method>-<data>-<backbone>-<id>/`.

    `run.json` is written last and holds the checksum of every other file, so a folder is complete only if all of it is
    there and undamaged. Until then, `checkpoint/` holds the state after the last complete task.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoint = path / "checkpoint"

    def complete_record(self, otherwise: str = "running again") -> dict[str, Any] | None:
        """The run record, if the run is complete and every file matches its checksum.

        Args:
            otherwise: what the caller does about a damaged folder, for the warning.
        """
        try:
            record = _read_json(self.path / "run.json")
            damaged = [
                name for name, checksum in record["files"].items() if file_checksum(self.path / name) != checksum
            ]
        except FileNotFoundError as error:
            if (self.path / "run.json").exists():
                log.warning("run folder %s lacks %s; %s", self.path, error.filename, otherwise)
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("run folder %s has a damaged run.json (%s); %s", self.path, error, otherwise)
            return None
        if damaged:
            log.warning("run folder %s: %s does not match its checksum; %s", self.path, ", ".join(damaged), otherwise)
            return None
        return record

    def clear(self, keep_checkpoint: bool = False) -> None:
        """Forget what is there but the log: a complete run (force), or what a killed or damaged one left."""
        kept = {"run.log", self._checkpoint.name} if keep_checkpoint else {"run.log"}
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if entry.name not in kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def save_checkpoint(self, progress: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Keep the state after a task: tensors, and JSON that holds their checksum."""
        name = f"task-{progress['tasks_done']}.safetensors"
        before = set(self._checkpoint.glob("task-*.safetensors"))
        with replacing(self._checkpoint / name) as temporary:
            save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, temporary)
        state = {
            "schema": SCHEMA,
            "tensors": name,
            "tensors_checksum": file_checksum(self._checkpoint / name),
            **progress,
        }
        _write_json(self._checkpoint / "state.json", state)
        for old in before - {self._checkpoint / name}:
            old.unlink()

    def load_checkpoint(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """What `save_checkpoint` kept; None where there is none, or it is damaged or of another schema."""
        file = self._checkpoint / "state.json"
        if not file.exists():
            return None
        try:
            state = _read_json(file)
            tensors = self._checkpoint / state["tensors"]
            if state["schema"] != SCHEMA or file_checksum(tensors) != state["tensors_checksum"]:
                raise ValueError("it does not match its checksum or schema")
            return state, load_file(tensors)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            log.warning("checkpoint %s is damaged (%s); starting from the first task", self._checkpoint, error)
            return None

    def write(
        self,
        record: dict[str, Any],
        config: dict[str, Any],
        tables: dict[str, tuple[list[str], list[list[Any]]]],
        partition: dict[str, np.ndarray],
        model: dict[str, torch.Tensor],
        figure: Any,
    ) -> dict[str, Any]:
        """Write every file, then run.json; returns the record with the checksums in it.

        Args:
            record: run.json without `files`.
            config: the resolved configuration.
            tables: file name -> (header, rows).
            partition: name -> index array.
            model: name -> tensor.
            figure: a matplotlib figure.
        """
        with replacing(self.path / "config.yaml") as temporary:
            temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
        for name, (header, rows) in tables.items():
            with replacing(self.path / name) as temporary, temporary.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(header)
                writer.writerows(rows)
        with replacing(self.path / "partition.npz") as temporary:
            np.savez_compressed(temporary, **partition)  # type: ignore[arg-type]
        with replacing(self.path / "model.safetensors") as temporary:
            save_file({key: tensor.cpu().contiguous() for key, tensor in model.items()}, temporary)
        with replacing(self.path / "accuracy.png") as temporary:
            figure.savefig(temporary, dpi=150)
        names = ["config.yaml", *tables, "partition.npz", "model.safetensors", "accuracy.png"]
        record = {**record, "files": {name: file_checksum(self.path / name) for name in names}}
        record = _write_json(self.path / "run.json", record)
        shutil.rmtree(self._checkpoint, ignore_errors=True)
        return record


def _checksum(content: dict[str, Any]) -> str:
    digest = content_hash()
    digest.update(json.dumps({k: v for k, v in content.items() if k != "checksum"}, sort_keys=True).encode())
    return digest.hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write `content` with a checksum of itself; returns what was written."""
    # Through JSON once, so that the checksum is of what a reader will see (lists for tuples, text for keys).
    content = json.loads(json.dumps(content, allow_nan=False))
    content["checksum"] = _checksum(content)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    """What `_write_json` wrote. Raises ValueError where it does not match its own checksum."""
    content = json.loads(path.read_text())
    if content["checksum"] != _checksum(content):
        raise ValueError("it does not match its own checksum")
    return content


def run_tables(
    stream: Stream, ledger: Ledger, accuracy: list[float], matrix: np.ndarray, bounds: list[dict[str, float | None]]
) -> dict[str, tuple[list[str], list[list[Any]]]]:
    """tasks.csv, accuracy_matrix.csv, uploads.csv and, if there are any, bounds.csv as headers and rows.

    Tasks, rounds and clients count from 0.
    """
    totals = [ledger.task_totals(task.index) for task in stream.tasks]
    tasks = [
        [
            task.index,
            task.columns_seen,
            len(stream.train[task.index]),
            *list(ledger.labels(task.index).values())[1:],
            len(stream.test[task.index]),
            accuracy[task.index],
            *totals[task.index].values(),
            totals[task.index]["client_seconds"] / ledger.clients + totals[task.index]["server_seconds"],
        ]
        for task in stream.tasks
    ]
    return {
        "tasks.csv": (
            [
                "task",
                "classes_seen",
                "train_samples",
                "labelled",
                "accepted",
                "right",
                "test_samples",
                "accuracy",
                *totals[0],
                "seconds",
            ],
            tasks,
        ),
        "accuracy_matrix.csv": (
            [f"task_{task.index}" for task in stream.tasks],
            [["" if np.isnan(value) else float(value) for value in row] for row in matrix],
        ),
        "uploads.csv": (
            [field.name for field in fields(Upload)],
            [list(asdict(row).values()) for row in ledger.uploads],
        ),
        **({"bounds.csv": (list(bounds[0]), [list(row.values()) for row in bounds])} if bounds else {}),
    }


def partition_arrays(stream: Stream, shards: list[list[np.ndarray]], labelled: np.ndarray) -> dict[str, np.ndarray]:
    """`class_order`, and index arrays into the data set: `train_t<t>_c<k>`, `test_t<t>`, `unlabelled`; t, k from 0."""
    arrays = {"class_order": stream.class_order, "unlabelled": np.flatnonzero(~labelled)}
    for task, (clients, test) in enumerate(zip(shards, stream.test, strict=True)):
        arrays[f"test_t{task}"] = test
        arrays.update({f"train_t{task}_c{client}": indices for client, indices in enumerate(clients)})
    return arrays
