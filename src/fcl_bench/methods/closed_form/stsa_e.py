"""STSA-E: STSA whose server estimates the Gram matrix from first-order statistics (Guan et al., Sec. 2.3).

Each client splits its samples at random into dummy clients and sends each one's class sums and class counts. The
scatter of the sums of equally large groups around the class mean gives the server the within-class covariance.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import require_memory
from fcl_bench.linalg.gram import add_class_sums
from fcl_bench.methods.closed_form.algebra.class_scatter import ClassScatter
from fcl_bench.methods.closed_form.algebra.upload_sizes import both_conventions, stsa_e_values
from fcl_bench.methods.closed_form.base import (
    ClosedFormClient,
    ClosedFormMethod,
    positions,
    ridge_knob,
    sums_without_samples,
)
from fcl_bench.methods.closed_form.ridge_server import RidgeServer
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.fields import Schema, counts, real
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.task import Task
from fcl_bench.randomness import generator


class STSAEClient(ClosedFormClient):
    """Class sums and counts of K_D random groups of the client's samples."""

    method: STSAE

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """C (M, K_D c_t), group by group, and n (K_D, c_t)."""
        columns, groups = broadcast["columns"], self.method.dummy_clients
        rng = generator(self.context.seed, "dummy clients", client_data.task, client_data.client)
        # Groups differ by one sample at most.
        group = torch.from_numpy(rng.permutation(len(client_data.labels)) % groups).to(client_data.labels.device)
        cell = group * len(columns) + positions(client_data, columns)
        cells = groups * len(columns)
        sums = client_data.inputs.new_zeros(cells, self.dimension)
        features = self.random_features(broadcast)
        for H, own in zip(features.blocks(client_data.inputs), cell.split(features.rows), strict=True):
            add_class_sums(sums, H, own)
        sizes = torch.bincount(cell, minlength=cells).to(torch.int32)
        upload = {"C": sums.T, "n": sizes.reshape(groups, len(columns))}
        return Message(upload, per_class=["C"], sums_of={"C": cell}), state


class STSAEServer(RidgeServer):
    """Estimates each task's Gram matrix (Eq. 9), adds it up over tasks; W = (G_hat + gamma I)^-1 C (Eq. 10)."""

    method: STSAE
    #: The server makes G itself, and it is positive semidefinite whatever the wire did to the sums.
    sums_what_came = False

    def __init__(self, method: STSAE, context: Context) -> None:
        super().__init__(method, context)
        self._scatter = ClassScatter(self.zeros(0, self.dimension))
        #: The sums of tasks that still await uploads, and the number of these uploads, by the task's number.
        self._awaited: dict[int, ClassScatter] = {}
        self._missing: dict[int, int] = {}
        #: Those of them whose estimate is taken out of G and B until the task at hand is finished.
        self._reopened: dict[int, tuple[Task, ClassScatter]] = {}

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self._scatter = ClassScatter(self.zeros(len(task.columns), self.dimension))

    def await_late(self, task: Task) -> None:
        """Keep the task's sums, since both weights of Eq. 9 depend on all of its groups."""
        self._awaited[task.index] = self._scatter
        self._missing[task.index] = self._missing.get(task.index, 0) + 1

    def expects_late(self, task: Task, round_: int) -> Schema | None:
        return self.expects(task, round_) if task.index in self._awaited else None

    def absorb_late(self, client: int, upload: Message, task: Task) -> None:
        """Add to the task's sums. Its estimate is taken out once, and made anew when the task at hand is finished."""
        self._reopen(task)
        now, self._scatter = self._scatter, self._awaited[task.index]
        self.absorb(client, upload)
        self._scatter = now
        self._came(task)

    def lose_late(self, task: Task) -> None:
        self._came(task)

    def _reopen(self, task: Task) -> None:
        if task.index not in self._reopened:
            self._reopened[task.index] = task, self._awaited[task.index]
            with self.in_columns_of(task):
                self._add_estimate(self._awaited[task.index], -1)

    def _came(self, task: Task) -> None:
        """Await one upload less. Once all uploads of a task have come, its sums are no longer needed."""
        self._missing[task.index] -= 1
        if not self._missing[task.index]:
            del self._awaited[task.index], self._missing[task.index]

    def expects(self, task: Task, round_: int) -> Schema:
        groups, classes = self.method.dummy_clients, len(task.columns)
        return {
            "C": real(self.dimension, groups * classes, least=self.floor_of_features),
            "n": counts(groups, classes),
        }

    def objection(self, upload: Message) -> str:
        return super().objection(upload) or sums_without_samples(upload["C"], upload["n"].flatten())

    def absorb(self, client: int, upload: Message) -> None:
        groups, classes = upload["n"].shape
        self._scatter.add(upload["C"].T.reshape(groups, classes, self.dimension), upload["n"])
        self.count(upload)
        self.samples += int(upload["n"].sum())

    def finish_task(self) -> None:
        for task, scatter in self._reopened.values():
            with self.in_columns_of(task):
                self._add_estimate(scatter, 1)
        self._reopened = {}
        if lone := self._add_estimate(self._scatter, 1):
            self.notices.tell(
                "lone groups",
                f"stsa_e: {lone} classes of a task are in one group only, so their covariance is unknown and only their"
                " mean is used; a larger method.dummy_clients would help",
                logging.INFO,
            )
        super().finish_task()

    def _add_estimate(self, scatter: ClassScatter, sign: int) -> int:
        """Add a task's sums and estimate, or take them out. Returns the number of classes that only one group holds."""
        self.add_class_sums(sign * scatter.sums.T)
        return scatter.add_to(self.estimate.matrix, self.method.estimator == "unbiased", sign)

    def statistics(self) -> dict[str, torch.Tensor]:
        awaited = {
            f"awaited.{task}.{name}": part
            for task, scatter in self._awaited.items()
            for name, part in {**scatter.state_dict(), "missing": torch.tensor(self._missing[task])}.items()
        }
        return {**super().statistics(), **awaited}

    def load_statistics(self, state: dict[str, torch.Tensor]) -> None:
        super().load_statistics({name: part for name, part in state.items() if not name.startswith("awaited.")})
        parts: dict[int, dict[str, torch.Tensor]] = {}
        for name, part in state.items():
            if name.startswith("awaited."):
                _, task, own = name.split(".")
                parts.setdefault(int(task), {})[own] = part
        self._missing = {task: int(own.pop("missing")) for task, own in parts.items()}
        self._awaited = {task: ClassScatter.restored(own) for task, own in parts.items()}


@dataclass
class STSAE(ClosedFormMethod):
    """Knobs of STSA-E.

    Args:
        M: number of random features; None: the backbone's features themselves, H = Z.
        gamma: ridge coefficient of Eq. 10; "auto", "gcv": chosen by the statistics.
        dummy_clients: K_D, the groups into which each client splits its samples.
        estimator: "paper" counts all groups of the task in Eq. 9, as printed; "unbiased" those that hold the class.
        scale_scores: divide each class's scores by the root of their sum over the class's own samples (true), or by
            the length of its weights (length), as the public code does.
    """

    name: ClassVar[str] = "stsa_e"
    client_half = STSAEClient
    server_half = STSAEServer

    gamma: float | str = ridge_knob(1e4, least=0)
    dummy_clients: int = knob(10, least=1)
    estimator: str = knob("paper", choices=("paper", "unbiased"))

    @property
    def penalty(self) -> float | str:
        return self.gamma

    def needs_each_upload(self) -> tuple[str, str]:
        return "the server of stsa_e tells the groups of every client apart", "method=stsa, which it estimates"

    def paper_bytes(self, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
        M, groups = self.dimension(context), self.dummy_clients
        # FedRAN's table charges STSA-E for K_D + 1 groups.
        in_fedran = stsa_e_values(M, context.all_classes(classes_per_task), groups + 1)

        def values(classes: int) -> int:
            return stsa_e_values(M, classes, groups)

        return both_conventions(values, context, classes_per_task, in_fedran)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        values = (self.dimension(context) + 1) * max(classes_per_task) * self.dummy_clients
        require_memory(f"method.dummy_clients={self.dummy_clients}", 8 * values, "one upload")
