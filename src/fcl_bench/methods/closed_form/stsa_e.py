"""STSA-E: STSA whose server estimates the Gram matrix from first-order statistics (Guan et al., Sec. 2.3).

Each client splits its samples at random into dummy clients and sends each one's class sums and class counts. The
scatter of the sums of equally large groups around the class mean gives the server the within-class covariance.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.errors import require_memory
from fcl_bench.linalg.gram import add_class_sums, add_gram
from fcl_bench.methods.closed_form.base import ClosedFormClient, positions
from fcl_bench.methods.closed_form.ridge import RidgeMethod, RidgeServer, ridge_knob
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, SUMS, Field, Schema, counts
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.state import restore, saved
from fcl_bench.randomness import generator

#: The attributes of a `ClassScatter`.
_SCATTER = ("sums", "missing", "_size", "_holding", "_groups", "_rows_stored", "_rows", "_classes", "_products")


class ClassScatter:
    """Adds groups as they arrive and estimates, per class i over the groups j so far,

        G_i = (n_i - 1) / (K_i - 1) sum_j C_j C_j' / n_j  -  (n_i - K_i) / (n_i (K_i - 1)) S S',

    with S = sum_j C_j and n_i = sum_j n_j (Eq. 9). K_i is the number of groups that hold class i: the proof counts one
    covariance term for each group in the sum. The paper prints K, the number of all groups.

    Both weights depend on the whole task, so the rows C_j' / sqrt(n_j) of the groups that hold a class are stored until
    it ends; there are no more of them than samples in the task. If they are more than M per class, the M x M products
    of the classes are stored instead. The estimate is two symmetric products.

    Args:
        like: (c, M) a tensor with the shape, type and device of the sums.

    Attributes:
        sums: (c, M) the class sums of all groups, S' in each row.
        missing: the number of late uploads whose groups are still to come.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.sums = torch.zeros_like(like)
        self.missing = 0
        self._size = like.new_zeros(len(like))
        self._holding = like.new_zeros(len(like))
        self._groups = self._rows_stored = 0
        #: The rows of each call of `add` since the last `_fold`, and their classes.
        self._rows: dict[int, torch.Tensor] = {}
        self._classes: dict[int, torch.Tensor] = {}
        self._products: torch.Tensor | None = None

    def add(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add groups with class sums `sums` (groups, c, M) and class counts `counts` (groups, c)."""
        held = counts > 0
        self.sums += sums.sum(dim=0)
        self._size += counts.sum(dim=0)
        self._holding += held.sum(dim=0)
        self._groups += len(counts)
        call, classes = len(self._rows), torch.nonzero(held)[:, 1]
        self._rows[call] = sums[held].div_(counts[held].to(sums).sqrt().unsqueeze(1))
        self._classes[call] = classes
        self._rows_stored += len(classes)
        if self._rows_stored >= self.sums.numel():
            self._fold()

    def _fold(self) -> None:
        """Replace the rows kept so far by their products, class by class."""
        rows, classes = torch.cat(list(self._rows.values())), torch.cat(list(self._classes.values()))
        if self._products is None:
            c, M = self.sums.shape
            self._products = rows.new_zeros(c, M, M)
        for number, product in enumerate(self._products):
            add_gram(product, rows[classes == number])
        self._rows, self._classes, self._rows_stored = {}, {}, 0

    def add_to(self, G: torch.Tensor, unbiased: bool, sign: int = 1) -> int:
        """G += the sum of the estimates over classes, or -= it.

        Args:
            G: (M, M), changed in place.
            sign: 1, or -1 to take out what was added before.
            unbiased: with K_i; otherwise as printed, with K for K_i and weights below zero set to zero (as in the
                paper's public code).

        Returns:
            the number of classes of which K (unbiased: K_i) is 1. Their covariance can't be estimated; their part of G
            is S S' / n_i.
        """
        n, K = self._size, self._holding if unbiased else torch.full_like(self._size, self._groups)
        several = K > 1
        degrees = (K - 1).clamp_min(1)
        first = torch.where(several, (n - 1) / degrees, 1.0).clamp_min(0)
        second = torch.where(several, (n - K) / (n.clamp_min(1) * degrees), 0.0).clamp_min(0)
        # A class has at least as many samples as groups that hold it, so only the printed form is ever clamped.
        held = n > 0
        first, second = first * held, second * held
        if self._products is not None:
            G += sign * torch.einsum("c,cij->ij", first, self._products)
        if self._rows:
            rows, classes = torch.cat(list(self._rows.values())), torch.cat(list(self._classes.values()))
            add_gram(G, rows.mul_(first.sqrt()[classes].unsqueeze(1)), sign)
        add_gram(G, self.sums * second.sqrt().unsqueeze(1), -sign)
        return int((~several & held).sum())


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
        return Message(upload, groups={"C": cell}), state


class Awaited(dict[int, ClassScatter]):
    """The sums of tasks that still await uploads, by the task's number."""

    def one_less(self, task: Task) -> None:
        """Await one upload less. Once all uploads of a task have come, its sums are no longer needed."""
        self[task.index].missing -= 1
        if not self[task.index].missing:
            del self[task.index]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {f"{task}.{name}": part for task, sums in self.items() for name, part in saved(sums, _SCATTER).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.clear()
        for task in dict.fromkeys(name.split(".")[0] for name in state):
            own = {name.removeprefix(f"{task}."): part for name, part in state.items() if name.startswith(f"{task}.")}
            self[int(task)] = ClassScatter(own["sums"])
            restore(self[int(task)], _SCATTER, own, own["sums"].device)


class STSAEServer(RidgeServer):
    """Estimates each task's Gram matrix (Eq. 9), adds it up over tasks; W = (G_hat + gamma I)^-1 C (Eq. 10)."""

    method: STSAE
    state: ClassVar[Sequence[str]] = ("awaited",)
    #: The server makes G itself, and it is positive semidefinite whatever the wire did to the sums.
    sums_what_came = False

    def __init__(self, method: STSAE, context: Context) -> None:
        super().__init__(method, context)
        self.awaited = Awaited()
        self._scatter = ClassScatter(self.zeros(0, self.dimension))
        #: The awaited sums whose estimate is taken out of G and B until the task at hand is finished.
        self._reopened: dict[int, tuple[Task, ClassScatter]] = {}

    def schema(self, task: Task, stage: str) -> Schema:
        fields = super().schema(task, stage)
        columns = self.method.dummy_clients * len(task.columns)
        return {**fields, "C": dataclasses.replace(fields["C"], shape=(self.dimension, columns))}

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self._scatter = ClassScatter(self.zeros(len(task.columns), self.dimension))

    def await_late(self, task: Task) -> None:
        """Keep the task's sums, since both weights of Eq. 9 depend on all of its groups."""
        self._scatter.missing += 1
        self.awaited[task.index] = self._scatter

    def lose_late(self, task: Task) -> None:
        self.awaited.one_less(task)

    def late_stage(self, task: Task, round_: int) -> str | None:
        return "statistics" if task.index in self.awaited else None

    def absorb_late(self, client: int, upload: Message, task: Task) -> None:
        """Add to the task's sums. Its estimate is taken out once, and made anew when the task at hand is finished."""
        sums = self.awaited[task.index]
        if task.index not in self._reopened:
            self._reopened[task.index] = task, sums
            with self.in_columns_of(task):
                self._add_estimate(sums, -1)
        now, self._scatter = self._scatter, sums
        self.absorb(client, upload)
        self._scatter = now
        self.awaited.one_less(task)

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


@dataclass
class STSAE(RidgeMethod):
    name: ClassVar[str] = "stsa_e"
    client_half = STSAEClient
    server_half = STSAEServer
    penalty_knob = "gamma"
    in_tables = True
    counts_samples = True

    gamma: float | str = ridge_knob(1e4, least=0)
    dummy_clients: int = knob(10, least=1)
    estimator: str = knob("paper", choices=("paper", "unbiased"))

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        shape, least = ("M", "K_D c"), self.least_feature
        exact = "method=stsa, whose Gram matrix it estimates"
        C = Field(shape, least=least, columns=CLASSES, leaks=SUMS, zero_without="n", otherwise=exact)
        return {"statistics": {"C": C, "n": counts(self.dummy_clients, "c")}}

    def paper_values(self, context: Context, classes: int) -> int:
        """C and n of every group."""
        return (self.dimension(context) + 1) * classes * self.dummy_clients

    def fedran_values(self, context: Context, classes_per_task: Sequence[int]) -> int:
        """With K_D + 1 groups, as FedRAN's table has it."""
        return super().fedran_values(context, classes_per_task) // self.dummy_clients * (self.dummy_clients + 1)

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        values = self.paper_values(context, max(classes_per_task))
        require_memory(f"method.dummy_clients={self.dummy_clients}", 8 * values, "one upload")
