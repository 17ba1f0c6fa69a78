"""AFCL: analytic federated continual learning ("AFCL: ... for Spatio-Temporal Invariance of Non-IID Data").

Clients register with the server, one after the other, and name their classes; the server tells them which are known
(introduced by an earlier client) and which are not. Each client then solves its own ridge regression for both and sends
it with its regularised Gram matrix. New data at an old client are a new, virtual client, so a task of K clients is K
registrations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.methods.closed_form.afl import LocalRidge
from fcl_bench.methods.closed_form.base import one_hot
from fcl_bench.methods.closed_form.ridge import RidgeMethod, RidgeServer, ridge_knob
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, MOMENTS, OPEN, SUM, SUMS, Schema, class_numbers, gram_matrix, real
from fcl_bench.protocol.message import Message

#: The stage in which clients name their classes.
REGISTRATION = "registration"


class AFCLClient(LocalRidge):
    """Round 0: registers. Round 1: analytic local training (Sec. 3.3)."""

    method: AFCL

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """`classes`, those the client holds; then G_k = X'X + gamma I (d, d), W_known and W_unknown, and their columns.

        W_known has the task's classes introduced before the client's own or, if it introduced none, up to the last it
        holds: all others would be columns of zeros. The column numbers travel along, 4 bytes each, so an upload may
        arrive even after its task.
        """
        held = client_data.labels.unique()
        if broadcast.stage == REGISTRATION:
            return Message({"classes": held.to(torch.int32)}), state
        columns, owners = (broadcast[name].to(held.device) for name in ("columns", "owners"))
        X, samples = self.features(client_data, broadcast), self.reported_samples(client_data)
        if self.context.sums:
            # In the columns of all classes that were named, so that nobody learns which of them a client holds.
            G, W = self.solve(X, one_hot(client_data, columns), self.method.gamma)
            return Message({"G": G, "B": G @ W}, samples=samples), state
        mine = torch.nonzero(owners == client_data.client).squeeze(1)
        known = int(mine[0]) if len(mine) else 1 + int(torch.nonzero(torch.isin(columns, held)).max())
        learnt = torch.cat([columns[:known], columns[mine]])
        Y = one_hot(client_data, learnt)
        G, W = self.solve(X, Y, self.method.gamma)
        upload = {"G": G, "W_known": W[:, :known], "W_unknown": W[:, known:], "columns": learnt}
        # G and both parts of W together give the class sums G W, each class once.
        which = Y.argmax(dim=1)
        groups = {"W_known": which.where(which < known, -1), "W_unknown": which.where(which >= known, -1)}
        return Message(upload, samples=samples, groups=groups), state


class AFCLServer(RidgeServer):
    """Registers clients, then aggregates recursively (Sec. 3.4).

    The recursion for the Global Knowledge Matrix multiplies each state by G_agg before it adds to it, so the server
    keeps the product B = G_agg GKM, a running sum, and solves when the GKM is requested. Uploads may arrive in any
    order: registration has settled the columns.

    Attributes:
        order: (C,) the stream's column of each column of the GKM: classes in order of registration.
    """

    method: AFCL
    state: ClassVar[Sequence[str]] = ("order",)

    def __init__(self, method: AFCL, context: Context) -> None:
        super().__init__(method, context)
        self._task = 0
        self.order = torch.zeros(0, dtype=torch.int64)
        #: Of each class in `order`, the client that introduced it in this task; -1: known before.
        self._owners = self.order
        #: Whether some client of this task has named it.
        self._named = self.order.bool()

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self._task = task.index
        self._owners = torch.full_like(self.order, -1)
        self._named = torch.zeros_like(self.order, dtype=torch.bool)

    def rounds(self, task: Task) -> int:
        """Registration, then statistics."""
        return 2

    def broadcast(self, task: Task, round_: int) -> Message:
        """Round 0: nothing. Round 1: the projection, and the task's classes in order of registration with the client
        that introduced each (-1: an earlier task)."""
        if round_ == 0:
            return Message({}, REGISTRATION)
        message = dict(super().broadcast(task, round_))
        message["columns"] = self.order[self._named].to(torch.int32)
        message["owners"] = self._owners[self._named].to(torch.int32)
        return Message(message)

    def schema(self, task: Task, stage: str) -> Schema:
        """With the classes that clients may hold: those named in this task, or, of an earlier one, its known ones."""
        fields = super().schema(task, stage)
        if stage == REGISTRATION:
            return {"classes": replace(fields["classes"], among=frozenset(task.columns))}
        known = self.order[self._named] if task.index == self._task else self.order
        named = frozenset(known.tolist()).intersection(task.columns)
        if self.context.sums:
            return {**fields, "B": replace(fields["B"], shape=(self.dimension, len(named)))}
        parts = {name: replace(fields[name], widest=len(named)) for name in ("W_known", "W_unknown")}
        return {**fields, **parts, "columns": replace(fields["columns"], among=named)}

    def late_stage(self, task: Task, round_: int) -> str | None:
        """A registration of a task that is over is of no use: the classes named in time are in `order`."""
        return None if round_ == 0 else "statistics"

    def objection(self, upload: Message) -> str:
        if upload.stage == REGISTRATION:
            return "" if len(upload["classes"]) else "it names no class"
        if "W_known" in upload:
            columns, known, unknown = len(upload["columns"]), upload["W_known"].shape[1], upload["W_unknown"].shape[1]
            if columns != known + unknown:
                return f"columns has {columns} numbers, W_known {known} columns and W_unknown {unknown}"
        return super().objection(upload)

    def absorb(self, client: int, upload: Message) -> None:
        if upload.stage == REGISTRATION:
            self._register(client, upload["classes"].cpu().long())
            return
        if "B" in upload:
            self.B[:, self.order[self._named]] += upload["B"]
        else:
            knowledge = upload["G"] @ torch.cat([upload["W_known"], upload["W_unknown"]], dim=1)
            self.B[:, upload["columns"].long()] += knowledge
        self.estimate.matrix.add_(upload["G"])
        self.count(upload)

    def _register(self, client: int, classes: torch.Tensor) -> None:
        unknown = classes[~torch.isin(classes, self.order)]
        self.order = torch.cat([self.order, unknown])
        self._owners = torch.cat([self._owners, torch.full_like(unknown, client)])
        self._named = torch.isin(self.order, classes) | torch.nn.functional.pad(self._named, (0, len(unknown)))

    def offset(self) -> float:
        """W = (G_agg - k gamma I + lambda I)^-1 G_agg GKM (Eq. 10)."""
        return -self.uploads * self.method.gamma

    def restored(self) -> None:
        self.order = self.order.cpu()
        super().restored()


@dataclass
class AFCL(RidgeMethod):
    name: ClassVar[str] = "afcl"
    client_half = AFCLClient
    server_half = AFCLServer
    ignores_partition = True
    in_tables = True

    M: int | None = knob(None, least=1)
    gamma: float = knob(1.0, least=0)
    ridge: float | str | None = ridge_knob(None, least=0)

    @property
    def penalty(self) -> float | str:
        return self.gamma if self.ridge is None else self.ridge

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        G = gram_matrix("M", self.least_feature, combine=SUM, leaks=MOMENTS)
        if context.sums:
            statistics = {"G": G, "B": real("M", "named", combine=SUM, columns=CLASSES, leaks=SUMS)}
        else:
            parts = {f"W_{part}": real("M", part, columns=CLASSES, leaks=SUMS) for part in ("known", "unknown")}
            statistics = {"G": G, **parts, "columns": class_numbers("learnt", distinct=True)}
        return {REGISTRATION: {"classes": class_numbers("held", distinct=True, combine=OPEN)}, "statistics": statistics}
