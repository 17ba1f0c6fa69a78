"""Centralised ridge: ridge regression on everyone's features in one place, the ceiling of the closed-form methods.

This is no federated method: clients send their samples' features and labels, which the others avoid. It is the
reference for comparisons, under the same random features, split and accounting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fcl_bench.linalg.gram import add_grams, class_sums
from fcl_bench.methods.closed_form.base import ClosedFormClient
from fcl_bench.methods.closed_form.ridge import RidgeMethod, RidgeServer, ridge_knob
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import SUMS, Schema, class_numbers, real
from fcl_bench.protocol.message import Message


class CentralisedRidgeClient(ClosedFormClient):
    """Sends its samples' features and labels."""

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """Z (n, d) and the labels (n)."""
        each = torch.arange(len(client_data.labels))
        upload = {"Z": client_data.inputs, "labels": client_data.labels.to(torch.int32)}
        return Message(upload, groups={"Z": each}), state


class CentralisedRidgeServer(RidgeServer):
    """W = (H'H + lambda I)^-1 H'Y over all samples so far (FedRAN Eq. 4)."""

    method: CentralisedRidge
    sums_what_came = False
    absorbs_late = True

    def schema(self, task: Task, stage: str) -> Schema:
        fields = super().schema(task, stage)
        return {**fields, "labels": replace(fields["labels"], among=frozenset(task.columns))}

    def absorb(self, client: int, upload: Message) -> None:
        self.count(upload)
        self.samples += len(upload["labels"])
        batches = self.random_features.blocks(upload["Z"]), upload["labels"].split(self.random_features.rows)

        def summed() -> Iterator[torch.Tensor]:
            for H, labels in zip(*batches, strict=True):
                which = torch.searchsorted(self.columns, labels.to(self.columns))
                self.add_class_sums(class_sums(H, which, len(self.columns)))
                yield H

        add_grams(self.estimate.matrix, summed())


@dataclass
class CentralisedRidge(RidgeMethod):
    name: ClassVar[str] = "centralised_ridge"
    client_half = CentralisedRidgeClient
    server_half = CentralisedRidgeServer
    ignores_partition = True
    counts_samples = True

    ridge: float | str = ridge_knob(1e-3, least=0)

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        return {"statistics": {"Z": real("n", "d", leaks=SUMS), "labels": class_numbers("n")}}
