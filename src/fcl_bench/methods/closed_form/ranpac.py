"""FedRanPAC: ridge regression on random features whose ridge is cross-validated (McDonnell et al., NeurIPS 2023).

RanPAC is STSA with a ridge that each task chooses anew. Generalised cross-validation needs what STSA's clients send
anyway. To choose on held-out samples, clients send the sums of a fold of their samples apart, and the server
computes the squared error on it from these sums alone. Samples are assigned to folds by their values
alone, so the result is the centralised one, whatever the partition.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.algebra.ridge import AUTO, GCV, mean_share
from fcl_bench.methods.closed_form.base import positions
from fcl_bench.methods.closed_form.ridge import RidgeMethod
from fcl_bench.methods.closed_form.stsa import STSAClient, STSAServer, exact_sums
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, MOMENTS, SUM, SUMS, Schema, counts, gram_matrix, real
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import generator


def hash_factors(rng: np.random.Generator, inputs: int) -> torch.Tensor:
    """(d,) random odd whole numbers for `fold_numbers`."""
    return torch.from_numpy(rng.integers(-(2**62), 2**62, inputs) * 2 + 1)


def fold_numbers(samples: torch.Tensor, factors: torch.Tensor, count: int) -> torch.Tensor:
    """(n,) int64, the fold of each sample, from 0: a multilinear hash of its values.

    The values of `samples` (n, d) are rounded to float32, and their bits are read as integers x_j; the fold is the
    upper half of sum_j a_j x_j modulo 2^64, for the a_j of `hash_factors`, modulo the number of folds.
    """
    bits = (samples.float() + 0.0).contiguous().view(torch.int32)  # + 0.0, since zero has two signs
    hashes = (bits * factors.to(bits.device)).sum(dim=1)
    return (hashes >> 33).bitwise_and(2**31 - 1) % count


#: Errors that differ by less than this share of the sum of the squared labels count as equal: this is rounding.
_ROUNDING = 2.0**-44


class Sums(NamedTuple):
    """G = H'H (M, M), S = H'Y (M, C) and n of a set of samples H (n, M) with one-hot labels Y (n, C)."""

    G: torch.Tensor
    S: torch.Tensor
    samples: int


def squared_error(W: torch.Tensor, held: Sums) -> float:
    """sum_i |y_i - W'h_i|^2 = tr(W'G W) - 2 tr(W'S) + n over the samples of `held`, for W (M, C)."""
    return float((W * (held.G @ W - 2 * held.S)).sum()) + held.samples


def held_out_errors(training: Sums, held: Sums, ridges: Sequence[float]) -> torch.Tensor:
    """(k,) the squared errors on `held` of W = (G + lambda I)^-1 S on `training`, one per ridge lambda above 0.

    One eigendecomposition G = U diag(l) U' serves all ridges, and everything is rotated by U first: U'W is
    (l + lambda)^-1 U'S.
    """
    values, U = torch.linalg.eigh(training.G.double())
    values = values.clamp_min(0).unsqueeze(1)  # below zero is rounding
    S = U.T @ training.S.double()
    turned = Sums(U.T @ held.G.double() @ U, U.T @ held.S.double(), held.samples)
    errors = [squared_error(S / (values + ridge), turned) for ridge in ridges]
    return torch.tensor(errors, dtype=torch.float64)


def least(errors: torch.Tensor, samples: int) -> int:
    """The index of the smallest error (k,), a sum over `samples` samples; the first of those equal to rounding."""
    return int((errors <= errors.min() + _ROUNDING * samples).nonzero()[0])


#: A further value of `method.ridge`, beside a number, `auto` and `gcv`: a fold of the samples is held out.
HELD_OUT = "held_out"
#: One sample of so many is in the fold that is held out (RanPAC: the last 20 % of the task).
_FOLDS = 5
#: The ridges that are compared, as in RanPAC.
GRID = tuple(10.0**exponent for exponent in range(-8, 9))


class RanPACClient(STSAClient):
    """Sends STSA's statistics, of all samples, or of the held-out fold and of the others."""

    method: RanPAC

    def __init__(self, method: RanPAC, context: Context) -> None:
        super().__init__(method, context)
        self._factors = hash_factors(generator(context.seed, "folds"), context.inputs)

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """G and C as in STSA; or G_p (M, M), C_p (M, c_t) and n (2) of fold 0 (p = 0) and of all others (p = 1)."""
        if not self.method.holds_out:
            return super().update(client_data, broadcast, state)
        part = fold_numbers(client_data.inputs, self._factors, _FOLDS).clamp_max(1)
        tensors: dict[str, torch.Tensor] = {}
        groups: dict[str, torch.Tensor] = {}
        which = positions(client_data, broadcast["columns"])
        for number in (0, 1):
            own = part == number
            groups |= {f"C_{number}": torch.where(own, which, -1), f"G_{number}": own.to(which.dtype) - 1}
            sub = dataclasses.replace(client_data, inputs=client_data.inputs[own], labels=client_data.labels[own])
            sums, _ = super().update(sub, broadcast, {})
            tensors |= {f"G_{number}": sums["G"], f"C_{number}": sums["C"]}
        tensors["n"] = torch.bincount(part, minlength=2).to(torch.int32)
        return Message(tensors, groups=groups), state


class RanPACServer(STSAServer):
    """Keeps STSA's sums and those of the parts; W = (G + lambda I)^-1 C with the task's choice of lambda.

    Attributes:
        grams: (2, M, M) G of each part's samples: of all tasks so far, or of the task at hand (`scope`).
        sums: (2, M, C) C of the same samples.
        counted: their number, of each part.
        chosen: lambda of each task so far.
        errors: of each task, the squared error per held-out sample; NaN where nothing was held out.
    """

    method: RanPAC
    state: ClassVar[Sequence[str]] = ("grams", "sums", "counted", "chosen", "errors")
    by_class = ("B", "sums")

    def __init__(self, method: RanPAC, context: Context) -> None:
        super().__init__(method, context)
        parts = 2 if method.holds_out else 0
        self.grams = self.zeros(parts, self.dimension, self.dimension)
        self.sums = self.zeros(parts, self.dimension, 0)
        self.counted = [0] * parts
        self.chosen: list[float] = []
        self.errors: list[float] = []

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if self.method.scope == "task":
            self.grams.zero_()
            self.sums.zero_()
            self.counted = [0, 0]

    def late_stage(self, task: Task, round_: int) -> str | None:
        """With `scope=task` the parts are of the task at hand alone, so an upload of an earlier task is of no use."""
        return None if self.method.scope == "task" else super().late_stage(task, round_)

    def objection(self, upload: Message) -> str:
        for p, samples in enumerate(upload["n"].tolist() if self.method.holds_out else []):
            if not samples and bool(upload[f"C_{p}"].any()):
                return f"C_{p} is not zero, and n says that there is no sample"
        return super().objection(upload)

    def absorb(self, client: int, upload: Message) -> None:
        if not self.method.holds_out:
            super().absorb(client, upload)
            return
        for p, samples in enumerate(upload["n"].tolist()):
            G, C = upload[f"G_{p}"], upload[f"C_{p}"]
            self.estimate.matrix.add_(G)
            self.add_class_sums(C)
            self.grams[p].add_(G)
            self.sums[p][:, self.columns] += C
            self.counted[p] += samples
        self.count(upload)

    def finish_task(self) -> None:
        ridge, error = self._cross_validated() if self.method.holds_out else (super().choose_ridge(), math.nan)
        self.chosen.append(ridge)
        self.errors.append(error)
        super().finish_task()

    def choose_ridge(self) -> float:
        """The choice of the last task, which a resumed run has to repeat."""
        return self.chosen[-1]

    def candidates(self) -> torch.Tensor:
        return torch.tensor(GRID, dtype=torch.float64)

    def _cross_validated(self) -> tuple[float, float]:
        """The lambda with the least squared error on the samples held out, and that error per sample."""
        held, others = (Sums(*own) for own in zip(self.grams, self.sums, self.counted, strict=True))
        if not (held.samples and others.samples):
            self.notices.tell(HELD_OUT, f"ranpac: a fold has no sample, so the ridge is as with method.ridge={AUTO}")
            return mean_share(self.trace(), self.dimension), math.nan
        errors = held_out_errors(others, held, GRID)
        best = least(errors, held.samples)
        return GRID[best], float(errors[best]) / held.samples

    def report(self) -> dict[str, Any]:
        """`ridges`: lambda of each task; `held_out_errors`: squared error per sample held out, null where none was."""
        known = [None if math.isnan(error) else error for error in self.errors]
        return {
            **super().report(),
            "ridges": self.chosen,
            **({"held_out_errors": known} if self.method.holds_out else {}),
        }


@dataclass
class RanPAC(RidgeMethod):
    name: ClassVar[str] = "ranpac"
    client_half = RanPACClient
    server_half = RanPACServer
    ignores_partition = True

    ridge: float | str = knob(GCV, above=0, choices=(AUTO, GCV, HELD_OUT))
    scope: str = knob("all", choices=("all", "task"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope == "task" and not self.holds_out:
            raise UserError(
                f"method.scope=task says nothing with method.ridge={self.ridge}", f"method.ridge={HELD_OUT}"
            )

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        if not self.holds_out:
            return {"statistics": exact_sums(self)}
        # A sample's features decide which fold it is in, so that no noise covers it.
        least = self.least_feature
        fields = {f"G_{p}": gram_matrix("M", least, combine=SUM, leaks=MOMENTS) for p in (0, 1)}
        for p in (0, 1):
            fields[f"C_{p}"] = real("M", "c", least=least, of=f"G_{p}", combine=SUM, columns=CLASSES, leaks=SUMS)
        return {"statistics": {**fields, "n": counts(2, combine=SUM)}}

    @property
    def holds_out(self) -> bool:
        """Whether sums of two parts of the samples travel apart, and not one sum of all, as in STSA."""
        return self.ridge == HELD_OUT

    def matrices(self) -> int:
        """STSA's, both parts' sums at the server, as many in an upload, and three for the choice."""
        return super().matrices() + (7 if self.holds_out else 0)
