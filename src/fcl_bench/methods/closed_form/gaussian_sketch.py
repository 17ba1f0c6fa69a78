"""Gaussian sketch: fcl-bench's own method, wide random features whose upload hardly grows with their number.

Each class is close to Gaussian in the backbone's d features, and its mean and covariance are small. From them the
server computes what ReLU random features of any width M would have for class sums and covariances. The client adds the
directions in which its random features really vary most, as integers of a few bits, and its class sums along them:
there the server has what was measured, elsewhere what the model says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from fcl_bench.config import knob
from fcl_bench.errors import UserError, require_memory
from fcl_bench.linalg.gram import add_gram, class_sums
from fcl_bench.linalg.spectral import orthonormalised
from fcl_bench.methods.closed_form.algebra.class_scatter import ClassScatter, class_sketches
from fcl_bench.methods.closed_form.algebra.coding import coded, decoded
from fcl_bench.methods.closed_form.algebra.random_features import relu_covariance, relu_sums
from fcl_bench.methods.closed_form.algebra.remainder import Sketch, add_sketches, deviations, leading
from fcl_bench.methods.closed_form.algebra.softmax_steps import Drawn, DrawnClasses, softmax_steps
from fcl_bench.methods.closed_form.base import ClosedFormClient, counted, positions
from fcl_bench.methods.closed_form.ridge import RidgeMethod, RidgeServer, ridge_knob
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, SUMS, Field, Schema, counts, real
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed

#: The steps of the sketch and of the classes' directions, see `coded`: about 4 and 3 bits for an entry. The sketch's is
#: finer, since its rounding adds up over all uploads to what the solve inverts, the classes' only shapes the model.
_STEP, _CLASS_STEP = 0.25, 0.6
#: The most by which coding can raise the squares of a factor, since no entry more than doubles.
_CODED = 4.0
#: What the wire's rounding may move the sum of a field's numbers by, as a share.
_ROUNDING = 0.02
#: No step of features worth learning from is smaller; its square is a normal number in float32.
_LEAST_STEP = 1e-18
#: The largest squares of random features, as a share of the type's largest number: they are summed over all uploads.
_ROOM = 1e-8
#: No singular value of a factor in whole steps is a smaller share of the largest, but for rounding.
_DEPENDENT = 1e-10


class GaussianSketchClient(ClosedFormClient):
    """Moments of each class in the backbone's features, and the coded sketch of the random features' deviations."""

    method: GaussianSketch

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        columns = broadcast["columns"]
        which, classes = positions(client_data, columns), len(columns)
        H, Z = self.features(client_data, broadcast), client_data.inputs
        S, S_z = class_sums(H, which, classes), class_sums(Z, which, classes)
        A, A_z = deviations(H, which, S), deviations(Z, which, S_z)
        V, sigma = leading(A, self.method.rank)
        codes, step = coded(V * sigma, _STEP)
        U, lengths, widths, E_z = class_sketches(A_z, which, classes, self.method.class_rank)
        codes_z, step_z = coded(U * lengths, _CLASS_STEP)
        F = decoded(codes, step, len(V), self.method.rank)
        assert F is not None
        tensors = {
            **{"codes": codes, "T": F.to(S).T @ S, "E": A.square().sum().reshape(1)},
            # D_z is a matrix, which a 16-bit wire sends in 16 bits.
            **{"n": counted(client_data, columns), "S_z": S_z, "D_z": A_z.square().sum(dim=0).unsqueeze(1)},
            **{"codes_z": codes_z, "widths": widths, "E_z": E_z, "steps": S.new_tensor([step, step_z])},
        }
        return Message(tensors), state


class _Upload(NamedTuple):
    """What waits for the end of the task.

    Attributes:
        sketch: V and sigma of the decoded factor F, and what it drops.
        projected: (r, c) V' S.
        n, S_z, E_z: (c,), (d, c), (c,) of the message.
    """

    sketch: Sketch
    projected: torch.Tensor
    n: torch.Tensor
    S_z: torch.Tensor
    E_z: torch.Tensor


class GaussianSketchServer(RidgeServer):
    """G += V sigma^2 V' + sum_c S_c S_c'/n_c + e [(1 - mix) Pi Q Pi / tr(Pi Q Pi) + mix Pi / (M - r)], Pi = I - V V'.

    Q is the covariance that the task's random features would have if its classes were Gaussian, and S the class sums:
    those that the client measured in the span of V, those of its Gaussian classes outside. The uploads of a task wait
    for its end, when the classes' covariances are known.

    Attributes:
        scatter: N Sigma (d, d), the sum over all uploads so far of U lengths^2 U' with D_z for its diagonal.
        classes: what the uploads of the task at hand say of each class's own covariance.
        drawn: the classes of all tasks so far, where the method takes softmax steps.
        delta: what is added evenly to the eigenvalues of G.
    """

    method: GaussianSketch
    state: ClassVar[Sequence[str]] = ("scatter", "delta", "drawn")
    sums_what_came = False

    def __init__(self, method: GaussianSketch, context: Context) -> None:
        super().__init__(method, context)
        self.scatter = self.zeros(context.inputs, context.inputs)
        self.delta = 0.0
        self.drawn = DrawnClasses(self.scatter, method.class_rank)
        self._waiting: list[_Upload] = []

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self._waiting = []
        self.classes = ClassScatter(self.scatter, len(task.columns))

    def gram(self) -> torch.Tensor:
        """The estimate of the Gram matrix, G + delta I (M, M)."""
        return self.estimate.matrix + self.delta * torch.eye(self.dimension).to(self.B)

    def offset(self) -> float:
        return self.delta

    def _factors(self, upload: Message) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As coded: F (M, r), V diag(sigma), and U lengths (d, k)."""
        step, step_z = upload["steps"].tolist()
        most = self.method.class_rank * len(upload["n"])
        F = decoded(upload["codes"], step, self.dimension, self.method.rank)
        return F, decoded(upload["codes_z"], step_z, self.context.inputs, most)

    @cached_property
    def _gain(self) -> float:
        """||P||^2 (spectral norm): the most by which H = ReLU(Z P) raises squares, and squares of deviations."""
        P = self.random_features.projection
        assert P is not None  # `check` wants an M
        return float(torch.linalg.eigvalsh(P @ P.T)[-1])

    def objection(self, upload: Message) -> str:
        n, E_z, widths = upload["n"], upload["E_z"].double(), upload["widths"]
        single = ((n < 2) & ((E_z > 0) | (widths > 0))).any()
        totals = [n.sum(), single, upload["D_z"].double().sum(), E_z.sum(), upload["E"].double().sum()]
        totals += [self._squares(upload).sum(), upload["steps"].min(), widths.sum()]
        # One wait for a GPU in place of eight.
        samples, odd, diagonal, energy, E, squares, step, width = torch.stack([x.to(E_z) for x in totals]).tolist()
        if not samples:
            return "it is of no sample"
        if odd:
            return "E_z or widths is above 0 for a class of which n says fewer than 2 samples"
        if abs(diagonal - energy) > _ROUNDING * energy:
            return "D_z and E_z have different sums"
        if (1 + _ROUNDING) * self._gain * energy < E:
            return "E is more than inputs of this E_z give"
        if not self._gain * squares < _ROOM * torch.finfo(self.context.dtype).max:
            return "S_z holds numbers whose random features are out of range"
        if step < _LEAST_STEP:
            return f"steps holds {step:g}, less than {_LEAST_STEP:g}"
        F, factors = self._factors(upload)
        for name, factor, columns, most in (("", F, len(upload["T"]), E), ("_z", factors, int(width), energy)):
            if factor is None or factor.shape[1] != columns:
                return f"codes{name} are not those of {columns} columns"
            if float(factor.square().sum()) > _CODED * (1 + _ROUNDING) * most:
                return f"codes{name} have more than {_CODED:g} times the energy that E{name} says"
        return super().objection(upload)

    def _squares(self, upload: Message) -> torch.Tensor:
        """(c,) in float64: the sums of |z|^2 over the samples of each class."""
        sums = upload["S_z"].double().square().sum(dim=0)
        return upload["E_z"].double() + sums / upload["n"].clamp_min(1)

    def _measured(self, upload: Message, F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """V (M, r), sigma (r,) and V'S (r, c) in float64, of F (M, r).

        V'S = sigma^-2 V'F T, since V sigma^-2 V' F F' = V V'. No class sum is longer than |S_c| <= ||P|| sum |z|, so
        that a T which fits no samples has bounded effect.
        """
        V, sigma = orthonormalised(F)
        # Columns of whole numbers that depend on others leave directions that are rounding alone.
        live = sigma > _DEPENDENT * sigma.amax() if len(sigma) else sigma > 0
        V, sigma = V[:, live], sigma[live]
        weighted = V / sigma
        found = (weighted.T @ F) @ upload["T"].double() / sigma.unsqueeze(1)
        longest = (self._gain * upload["n"] * self._squares(upload)).sqrt()
        lengths = torch.linalg.vector_norm(found, dim=0)
        return V, sigma, found * (longest / lengths.clamp_min(longest)).nan_to_num(0.0)

    def absorb(self, client: int, upload: Message) -> None:
        F, factors = self._factors(upload)
        assert F is not None  # `objection` looked at both
        assert factors is not None
        V, sigma, projected = (part.to(self.B) for part in self._measured(upload, F))
        dropped = max(float(upload["E"] - sigma.square().sum()), 0.0)
        known = _Upload(Sketch(V, sigma, dropped), projected, upload["n"], upload["S_z"], upload["E_z"])
        self._waiting.append(known)
        factors = factors.to(self.scatter)
        self.classes.add(factors, upload["widths"], upload["E_z"])
        add_gram(self.scatter, factors.T)
        # Except for rounding, no entry of the factors' own diagonal is larger than D_z's.
        rest = upload["D_z"].squeeze(1) - factors.square().sum(dim=1)
        self.scatter.diagonal().add_(rest.clamp_min(0))
        self.samples += int(upload["n"].sum())
        self.count(upload)

    def finish_task(self) -> None:
        if self._waiting:
            P = self.random_features.projection
            assert P is not None  # `check` wants an M
            Sigma = self.scatter / self.samples
            sizes = torch.stack([upload.n for upload in self._waiting]).sum(dim=0)
            own = self.classes.beside(Sigma, sizes, self.method.class_rank)
            means = torch.stack([upload.S_z for upload in self._waiting]).sum(dim=0) / sizes.clamp_min(1)
            for upload in self._waiting:
                S = relu_sums(P, Sigma, own, upload.S_z, upload.n, upload.E_z)
                V = upload.sketch.V
                S += V @ (upload.projected - V.T @ S)
                self.add_class_sums(S)
                held = upload.n > 0
                self.estimate.add_factor(S[:, held] / upload.n[held].to(S).sqrt())
            Q = relu_covariance(P, Sigma, own, means, sizes)
            sketches = [upload.sketch for upload in self._waiting]
            self.delta += add_sketches(self.estimate.matrix, sketches, Q, self.method.mix)
            self._waiting = []
            if self.method.softmax_steps:
                self.drawn.add(self.columns, sizes, means, own)
        super().finish_task()

    def drawn_samples(self, step: int) -> Iterator[tuple[torch.Tensor, int, float]]:
        """Samples Z (n, d) of each class so far for a softmax step, with its column and what each sample counts for."""
        seed = derived_seed(self.context.seed, "softmax steps", self.B.shape[1], step)
        return self.drawn.draw(self.scatter / self.samples, seed)

    def solve(self) -> None:
        super().solve()
        if not self.method.softmax_steps or not len(self.drawn.columns):
            return
        A = self.estimate.matrix.to(torch.float64, copy=True)
        A.diagonal().add_(self.delta + self.ridge)
        L = torch.linalg.cholesky(A)

        def descent(gradient: torch.Tensor) -> torch.Tensor:
            return torch.cholesky_solve(gradient.to(L), L).to(gradient)

        def draw(step: int) -> Iterator[Drawn]:
            for Z, column, weight in self.drawn_samples(step):
                yield from ((H, column, weight) for H in self.random_features.blocks(Z))

        W, _ = self.classifier()
        self.W, self.scales = softmax_steps(W, descent, draw, self.method.softmax_steps), None


@dataclass
class GaussianSketch(RidgeMethod):
    """Knobs of the Gaussian sketch: see conf/method/gaussian_sketch.yaml."""

    name: ClassVar[str] = "gaussian_sketch"
    client_half = GaussianSketchClient
    server_half = GaussianSketchServer
    counts_samples = True

    rank: int = knob(64, least=0)
    class_rank: int = knob(16, least=0)
    mix: float = knob(0.1, least=0, most=1, words="a share, 0 to 1")
    softmax_steps: int = knob(0, least=0, neutral=0)
    ridge: float | str = ridge_knob("auto", above=0)
    scale_scores: bool | str = knob(True, choices=("length",))

    def matrices(self) -> int:
        # Q itself, and one more while the sketches are added.
        return super().matrices() + 2

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        super().check(context, classes_per_task)
        if self.M is None or self.activation != "relu":
            key = "M=null" if self.M is None else f"activation={self.activation}"
            raise UserError(
                f"method.{key}: method=gaussian_sketch needs random features of ReLU", "method=centred_sketch"
            )
        for knob_, value, limit, what in (
            ("rank", self.rank, self.M, "random"),
            ("class_rank", self.class_rank, context.inputs, "backbone's"),
        ):
            if value > limit:
                raise UserError(f"method.{knob_}={value} is more than the {limit} {what} features", f"0 to {limit}")
        pairs = self.class_rank * (self.class_rank + 1) // 2
        size = 8 * max(classes_per_task) * (self.M * pairs + context.inputs**2)
        require_memory(f"method.class_rank={self.class_rank}", size, "the covariances of a task's classes")
        size = 8 * (context.clients or 0) * self.M * self.rank
        kept = f"the factors of {context.clients} clients, kept until a task ends"
        require_memory(f"method.rank={self.rank}", size, kept)

    def uploads(self, context: Context) -> Mapping[str, Schema]:
        # A deviation from the mean of one sample is 0, so only the class sums reveal a single sample.
        sums = real("d", "c", columns=CLASSES, leaks=SUMS, zero_without="n")
        fields = {
            **{"codes": Field(("b",), "bytes"), "T": real("r", "c"), "E": real(1, least=0)},
            **{"n": counts("c"), "S_z": sums, "D_z": real("d", 1, least=0), "E_z": real("c", least=0)},
            **{"codes_z": Field(("b_z",), "bytes"), "widths": Field(("c",), "whole", 0, self.class_rank + 1)},
            "steps": real(2, least=0),
        }
        return {"statistics": fields}
