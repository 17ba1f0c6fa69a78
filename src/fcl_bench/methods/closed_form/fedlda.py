"""FedLDA: linear discriminants with a shared covariance (SLDA: Hayes and Kanan, CVPRW 2020), federated and exact.

One round per task. Each client sends its Gram matrix, class sums and counts; the server adds them up over clients and
tasks. The within-class covariance is a difference of these sums, so the classifier is the centralised one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.gram import add_class_sums, add_gram
from fcl_bench.linalg.solve import Solution, relative_rounding, solve_symmetric
from fcl_bench.methods.closed_form.base import ClosedFormClient, ClosedFormMethod, counted
from fcl_bench.methods.closed_form.fedncm import DiscriminantServer
from fcl_bench.protocol import fields
from fcl_bench.protocol.context import ClientData, Context, State
from fcl_bench.protocol.message import Message


def within_scatter(G: torch.Tensor, S: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """sum_c sum_(i in c) (h_i - mu_c)(h_i - mu_c)' = G - S diag(1/n) S' (M, M), in float64.

    The right-hand side cancels if the class means are far larger than the spread: in double precision half of the
    digits are lost if they are 10^4 times larger.
    """
    scatter = G.to(torch.float64, copy=True)
    held = n > 0
    return add_gram(scatter, (S[:, held].to(scatter) / n[held].to(scatter).sqrt()).T, -1)


def oas_share(trace: float, squared: float, size: int, samples: int) -> float:
    """The share of the identity in the oracle-approximating shrinkage estimator (Chen et al. 2010, Eq. 23), at most 1.

    From tr Sigma and tr Sigma^2 of the covariance (M, M) of N samples.
    """
    spread = squared - trace**2 / size
    numerator = (1 - 2 / size) * squared + trace**2
    denominator = (samples + 1 - 2 / size) * spread
    return 1.0 if numerator >= denominator else numerator / denominator


def solve_discriminant(Sigma: torch.Tensor, means: torch.Tensor, share: float, level: float, noise: float) -> Solution:
    """W = ((1 - share) Sigma + share level I)^-1 means (M, C), for a Sigma (M, M) that is off by `noise`.

    Sigma is overwritten.
    """
    Sigma.mul_(1 - share)
    shift = share * level
    # The solver takes errors relative to its entries, which are far smaller than the entries that were rounded.
    size = max(float(torch.linalg.matrix_norm(Sigma)), shift)
    rounding = min((1 - share) * noise / size, 1.0) if size else 0.0
    return solve_symmetric(Sigma, means, rounding, shift)


def noise_of(G: torch.Tensor, rounding: float) -> float:
    """The absolute error, in the Frobenius norm, of a matrix that is a difference of terms of the size of G (M, M).

    `rounding` is the relative error of the entries of G; see `linalg.solve.relative_rounding`.
    """
    size = float(torch.linalg.matrix_norm(G.to(torch.float64)))
    return (rounding + len(G) * torch.finfo(torch.float64).eps) * size


class FedLDAClient(ClosedFormClient):
    """Exact statistics of the client's samples."""

    method: FedLDA

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """G = H'H (M, M), S = H'Y (M, c_t) and n (c_t)."""
        columns = broadcast["columns"]
        sums = client_data.inputs.new_zeros(len(columns), self.dimension)
        maps = self.method.maps
        M = self.dimension // maps
        grams = {name: client_data.inputs.new_zeros(M, M) for name in gram_names(maps)}
        for H, which in self.blocks(client_data, broadcast):
            add_class_sums(sums, H, which)
            for G, own in zip(grams.values(), H.split(M, dim=1), strict=True):
                add_gram(G, own)
        return Message({**grams, "S": sums.T, "n": counted(client_data, columns)}), state


def gram_names(maps: int) -> list[str]:
    """The names of the Gram matrices of `maps` maps, each with its own."""
    return ["G"] if maps == 1 else [f"G{number}" for number in range(maps)]


class FedLDAServer(DiscriminantServer):
    """Sigma = (G - S diag(1/n) S') / (N - C), W = ((1 - eps) Sigma + eps I)^-1 mu, b_c = -mu_c'w_c / 2 + log prior_c.

    With several maps side by side in H, each has its own G and its own discriminants; the rows of W are theirs, one
    map after the other, and b has a row for each.

    Attributes:
        grams: (maps, M, M) sum of h h'.
        shares: the share of the identity in the covariance of each map, as last solved.
    """

    method: FedLDA
    state: ClassVar[Sequence[str]] = ("grams",)
    absorbs_late = True

    def __init__(self, method: FedLDA, context: Context) -> None:
        super().__init__(method, context)
        M = self.dimension // method.maps
        self.grams = self.zeros(method.maps, M, M)
        self.shares: list[float] = []

    def absorb(self, client: int, upload: Message) -> None:
        super().absorb(client, upload)
        for G, name in zip(self.grams, gram_names(self.method.maps), strict=True):
            G += upload[name]

    def solution(self) -> Solution:
        """The discriminants of each map; the largest condition number, and the first trouble."""
        maps = self.method.maps
        parts = self.B.chunk(maps), self.means().to(torch.float64).chunk(maps)
        rounding = relative_rounding(self.context.dtype, self.context.wire.dtype)
        noises = [noise_of(G, rounding) for G in self.grams]
        solved = [self._discriminants(*given) for given in zip(self.grams, *parts, noises, strict=True)]
        self.shares = [share for share, _ in solved]
        found = [solution for _, solution in solved]
        trouble = next((solution.trouble for solution in found if solution.trouble), "")
        W = torch.cat([solution.W for solution in found]).to(self.B)
        return Solution(W, max(solution.condition for solution in found), trouble)

    def _discriminants(
        self, G: torch.Tensor, S: torch.Tensor, means: torch.Tensor, noise: float
    ) -> tuple[float, Solution]:
        """The share of the identity, and W (M, C) of one map, whose scatter matrix is off by `noise`."""
        scatter = self.denoised(within_scatter(G, S, self.n), self.uploads)
        N, C = int(self.n.sum()), int((self.n > 0).sum())
        freedom = max(N - C, 1)
        Sigma = scatter.div_(freedom)
        if self.method.shrinkage == "oas":
            trace = max(float(Sigma.trace()), 0.0)
            share, level = oas_share(trace, float(Sigma.square().sum()), len(Sigma), N), trace / len(Sigma)
        else:
            share, level = float(self.method.shrinkage), 1.0
        return share, solve_discriminant(Sigma, means, share, level, noise / freedom)

    def biases(self) -> torch.Tensor:
        """-mu_c'w_c / 2 + log prior_c: (C,), and (maps, C) with several maps."""
        held = (self.n > 0).to(self.W)
        prior = held if self.method.prior == "uniform" else self.n.clamp_min(0).to(self.W)
        b = (prior / prior.sum()).log() - (self.means() / 2 * self.W).unflatten(0, (self.method.maps, -1)).sum(dim=1)
        return b[0] if self.method.maps == 1 else b

    def report(self) -> dict[str, Any]:
        """`shrinkage`: the share of the identity in the covariance, the mean over the maps."""
        return {**super().report(), "shrinkage": math.fsum(self.shares) / max(len(self.shares), 1)}


@dataclass
class FedLDA(ClosedFormMethod):
    """Knobs of FedLDA: see conf/method/fedlda.yaml.

    Attributes:
        bounded: whether it is known what one sample changes of an upload.
    """

    name: ClassVar[str] = "fedlda"
    search: ClassVar[Mapping[str, str]] = {"shrinkage": "log(1e-6,0.5)"}
    client_half: ClassVar[type[FedLDAClient]] = FedLDAClient
    server_half: ClassVar[type[FedLDAServer]] = FedLDAServer
    ignores_partition = True
    bounded: ClassVar[bool] = True

    M: int | None = knob(None, least=1)
    shrinkage: float | str = knob(1e-4, least=0, most=1, words="0 to 1", choices=("oas",))
    prior: str = knob("uniform", choices=("uniform", "counts"))

    def uploads(self, context: Context) -> Mapping[str, fields.Schema]:
        names, M = gram_names(self.maps), self.dimension(context) // self.maps
        least, most = self.least_feature, self.largest_feature
        square, column, count = (fields.SQUARE, fields.COLUMN, fields.COUNT) if self.bounded else ("", "", "")
        summed = fields.Field(
            ("M", "c"),
            combine=fields.SUM,
            one_sample=column,
            columns=fields.CLASSES,
            leaks=fields.SUMS,
            zero_without="n",
        )
        S = replace(summed, least=least, per_sample=most, of="G" if self.maps == 1 else "", by="n")
        largest = None if most is None else most**2
        G = fields.gram_matrix(
            M, least, per_sample=largest, combine=fields.SUM, one_sample=square, leaks=fields.MOMENTS
        )
        n = fields.counts("c", combine=fields.SUM, one_sample=count)
        return {"statistics": {**dict.fromkeys(names, G), "S": S, "n": n}}

    @property
    def largest_feature(self) -> float | None:
        """The largest absolute value that an entry of H can have; None: it is not known."""
        return None
