"""The progress of a federation. With the tensors of its parts, it is all that a resumed run needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.evaluation import Predictions
from fcl_bench.engine.ledger import Ledger
from fcl_bench.engine.reports import Absences, BatchedTurns

_ANSWERS, _CONFUSION, _SAMPLES = (GROWING + name for name in ("answers", "confusion", "samples"))
#: The fields of a `FederationState` that are JSON already.
_PLAIN = (
    *("tasks_done", "rounds_done", "server_seconds"),
    *("client_storage_bytes", "client_storage_max_bytes", "client_samples_kept"),
    *("absences", "missing", "batched_turns"),
)


def _none_absent() -> Absences:
    return {"silent": 0, "gone": 0, "lost": 0, "late": 0, "late_arrived": 0, "late_absorbed": 0, "late_dropped": 0}


def _none_batched() -> BatchedTurns:
    return {"turns_batched": 0, "turns_single": 0, "single_because": []}


@dataclass
class FederationState:
    """The progress of a run. With the tensors, it is all that a resumed run needs.

    Attributes:
        tasks_done: number of complete tasks.
        answers: right answers so far.
        ledger: bytes and seconds.
        rounds_done: complete rounds of the current task.
        server_seconds: the server's seconds in those rounds.
        client_storage_bytes: the most that any client has kept between turns so far, by kind.
        client_storage_max_bytes: the same for all kinds together.
        client_samples_kept: the most raw samples that any client has kept.
        absences: counts of turns without an upload in time, and of late uploads.
        missing: client and round of each turn of the current task that brought no upload in time and on which later
            rounds build.
        batched_turns: counts of turns whose training was done together with other clients' (`parallel_clients`).
    """

    tasks_done: int
    answers: Predictions
    ledger: Ledger
    rounds_done: int = 0
    server_seconds: float = 0.0
    client_storage_bytes: dict[str, int] = field(default_factory=dict)
    client_storage_max_bytes: int = 0
    client_samples_kept: int = 0
    absences: Absences = field(default_factory=_none_absent)
    missing: list[tuple[int, int]] = field(default_factory=list)
    batched_turns: BatchedTurns = field(default_factory=_none_batched)

    def save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The whole state: a little JSON, and tensors that only gain rows with tasks, clients and rounds."""
        saved = {name: getattr(self, name) for name in _PLAIN}
        saved |= {"answers": self.answers.state(), "ledger": self.ledger.state()}
        tensors = {_ANSWERS: self.answers.tensor(self.tasks_done), _CONFUSION: self.answers.confusion.tensor()}
        if self.answers.samples is not None:
            tensors[_SAMPLES] = self.answers.samples.tensor()
        return saved, {**self.ledger.tensors(), **tensors}

    def restore(self, saved: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `save` returned."""
        for name in _PLAIN:
            setattr(self, name, saved[name])
        self.answers.restore(saved["answers"], tensors[_ANSWERS])
        self.answers.confusion.restore(tensors[_CONFUSION])
        if self.answers.samples is not None:
            self.answers.samples.restore(tensors[_SAMPLES])
        self.ledger.restore(saved["ledger"], tensors)
