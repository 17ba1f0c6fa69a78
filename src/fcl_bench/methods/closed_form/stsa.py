"""STSA: spatial-temporal statistics aggregation (Guan et al., "Enhancing Federated Class-Incremental Learning ...").

One round per task. Each client sends the exact Gram matrix of its random features and its class sums; the server adds
them up over clients and tasks and solves ridge regression. The result is the centralised one, whatever the partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.linalg.gram import add_class_sums, grams
from fcl_bench.methods.closed_form.algebra.upload_sizes import both_conventions, stsa_values
from fcl_bench.methods.closed_form.base import ClosedFormClient, ClosedFormMethod, ridge_knob
from fcl_bench.methods.closed_form.ridge_server import RidgeServer
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.fields import CLASSES, COLUMN, SQUARE, SUM, Schema, gram_matrix, real
from fcl_bench.protocol.message import Message


class STSAClient(ClosedFormClient):
    """Exact statistics of the client's samples."""

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """G = H'H (M, M) and C = H'Y (M, c_t) over the task's classes."""
        M, like = self.dimension, client_data.inputs
        columns = broadcast["columns"]
        sums = like.new_zeros(len(columns), M)

        def summed() -> Iterator[torch.Tensor]:
            for H, which in self.blocks(client_data, broadcast):
                add_class_sums(sums, H, which)
                yield H

        upload = {"G": grams(summed(), like, M), "C": sums.T}
        return Message(upload, samples=self.reported_samples(client_data)), state


class STSAServer(RidgeServer):
    """G adds up over clients (Eq. 2) and tasks (Eq. 4); W = (G + gamma I)^-1 C (Eq. 8)."""

    absorbs_late = True

    def absorb(self, client: int, upload: Message) -> None:
        self.estimate.add(upload["G"])
        self.count(upload)
        self.add_class_sums(upload["C"])


@dataclass
class STSA(ClosedFormMethod):
    """Knobs of STSA.

    Args:
        M: number of random features; None: the backbone's features themselves, H = Z.
        gamma: ridge coefficient of Eq. 8; 0: the Moore-Penrose solution where the Gram matrix is singular; "auto",
            "gcv": chosen by the statistics.
        scale_scores: divide each class's scores by the root of their sum over the class's own samples (true), or by
            the length of its weights (length), as the public code does.
    """

    name: ClassVar[str] = "stsa"
    client_half = STSAClient
    server_half = STSAServer

    gamma: float | str = ridge_knob(1e4, least=0)

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        least = self.least_feature
        G = gram_matrix("M", least, combine=SUM, one_sample=SQUARE, added=True)
        C = real("M", "c", least=least, of="G", combine=SUM, one_sample=COLUMN, columns=CLASSES)
        return {"statistics": {"G": G, "C": C}}

    @property
    def penalty(self) -> float | str:
        return self.gamma

    def paper_bytes(self, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
        M = self.dimension(context)
        return both_conventions(lambda classes: stsa_values(M, classes), context, classes_per_task)
