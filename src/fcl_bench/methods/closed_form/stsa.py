"""STSA: spatial-temporal statistics aggregation (Guan et al., "Enhancing Federated Class-Incremental Learning ...").

One round per task. Each client sends the exact Gram matrix of its random features and its class sums; the server adds
them up over clients and tasks and solves ridge regression. The result is the centralised one, whatever the partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fcl_bench.linalg.gram import add_class_sums, grams
from fcl_bench.methods.closed_form.ridge import RidgeClient, RidgeMethod, RidgeServer, ridge_knob
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.fields import CLASSES, COLUMN, SQUARE, SUM, Schema, gram_matrix, real
from fcl_bench.protocol.message import Message


class STSAClient(RidgeClient):
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


def exact_sums(method: RidgeMethod) -> Schema:
    """The fields G = H'H and C = H'Y of `STSAClient`."""
    least = method.least_feature
    G = gram_matrix("M", least, combine=SUM, one_sample=SQUARE, added=True)
    C = real("M", "c", least=least, of="G", combine=SUM, one_sample=COLUMN, columns=CLASSES)
    return {"G": G, "C": C}


@dataclass
class STSA(RidgeMethod):
    name: ClassVar[str] = "stsa"
    client_half: ClassVar[type[STSAClient]] = STSAClient
    server_half: ClassVar[type[STSAServer]] = STSAServer
    ignores_partition = True
    penalty_knob = "gamma"
    in_tables = True

    gamma: float | str = ridge_knob(1e4, least=0)

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        return {"statistics": exact_sums(self)}
