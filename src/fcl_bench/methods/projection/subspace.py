"""Subspaces of layer inputs, which gradient projection protects (GPM, FOT, FedProTIP), and their audit."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from fcl_bench.environment import exact_attention, exact_kernels
from fcl_bench.linalg.spectral import Spectrum, summarise
from fcl_bench.methods.gradient.client import MODEL, ModelHolder
from fcl_bench.protocol.audit import Audit, FullData
from fcl_bench.protocol.context import ClientData, Context, Task
from fcl_bench.protocol.method import Server
from fcl_bench.training.network import Network

if TYPE_CHECKING:
    from fcl_bench.methods.projection.projected import ProjectedMethod, ProjectedServer


def project_out(delta: torch.Tensor, Phi: torch.Tensor) -> torch.Tensor:
    """delta (I - Phi Phi') for the update `delta` (out, ...) of a weight whose rows have d numbers (Eq. 2, 4).

    Args:
        delta: (out, ...), flattened to (out, d).
        Phi: (d, q) orthonormal columns.
    """
    flat = delta.flatten(1)
    return (flat - (flat @ Phi) @ Phi.T).view_as(delta)


class Projection:
    """`project_out` for many updates of one weight: in place, by the cheaper of two equivalent forms.

    An update (out, d) loses its part in the q columns of Phi, or keeps its part in the d - q of their complement:
    whichever are fewer. The columns are stored in the order of the weight's memory, since a channels-last weight of a
    convolution would otherwise be copied back and forth in every step.

    Args:
        Phi: (d, q) orthonormal.
        weight: (out, ...) with rows of d numbers; updates have its shape, memory layout and type.
    """

    def __init__(self, Phi: torch.Tensor, weight: torch.Tensor) -> None:
        side, count = Phi.shape
        self._complement = 2 * count > side
        if self._complement:
            Phi = torch.linalg.qr(Phi.double(), mode="complete")[0][:, count:]
        self._last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
        order = self._rows(torch.arange(side, device=Phi.device).view(1, *weight.shape[1:]))[0]
        self._basis = Phi[order].to(weight.dtype).contiguous()

    def _rows(self, update: torch.Tensor) -> torch.Tensor:
        """(out, d) in the order of memory: a view."""
        return update.permute(0, 2, 3, 1).flatten(1) if self._last else update.flatten(1)

    @torch.no_grad()
    def __call__(self, update: torch.Tensor) -> None:
        """Remove from `update` its part in the range of Phi."""
        rows = self._rows(update)
        if rows.data_ptr() != update.data_ptr():
            raise ValueError("the update has another memory layout than the weight")
        inside = rows @ self._basis
        if self._complement:
            torch.mm(inside, self._basis.T, out=rows)
        else:
            rows.addmm_(inside, self._basis.T, alpha=-1)


def outside(A: torch.Tensor, Phi: torch.Tensor) -> torch.Tensor:
    """The part of the columns of A (d, m) outside the range of Phi (d, q) (Eq. 6)."""
    # Twice, since once leaves rounding errors of the size of A.
    for _ in range(2):
        A = A - Phi @ (Phi.T @ A)
    return A


def core_basis(
    A: torch.Tensor,
    Phi: torch.Tensor,
    threshold: float,
    power: int = 1,
    rounded_to: torch.dtype | None = None,
    held: float = 0.0,
    below: bool = False,
) -> Spectrum:
    """The leading directions of A outside Phi that hold the share `threshold` of the spectrum's mass (Eq. 6-8).

    Args:
        A: (d, m) activation columns.
        Phi: (d, q) orthonormal: the directions protected already.
        threshold: epsilon, at most 1; at 0 or below, no direction is taken.
        power: of the singular values whose sum is the mass: 1 (FedProTIP Eq. 8), 2 (energy, as in GPM).
        rounded_to: the coarsest type that A was stored in; its rounding errors do not count as directions; None: A's
            own type.
        held: mass that counts as held before the first direction and as part of the total; 0: the share is that of A
            outside Phi.
        below: whether the last direction, with which the share is reached, is left out.

    Returns:
        U (d, r) orthonormal and orthogonal to Phi, and the singular values (r,), descending; r = 0 if A adds nothing,
        or if `held` is enough.
    """
    rest = outside(A, Phi)
    if not A.numel() or threshold <= 0:
        return Spectrum(A.new_zeros(A.shape[0], 0), A.new_zeros(0))
    # Rounding errors of A's entries have a norm below eps ||A||_F; those of the factorisation grow with its size.
    eps = max(4 * torch.finfo(rounded_to or A.dtype).eps, max(A.shape) * torch.finfo(A.dtype).eps)
    noise = eps * torch.linalg.matrix_norm(A)
    if torch.linalg.matrix_norm(rest) <= noise:
        return Spectrum(A.new_zeros(A.shape[0], 0), A.new_zeros(0))
    U, sigma = summarise(rest.T, min(rest.shape))[0]
    U, sigma = U[:, sigma > noise], sigma[sigma > noise]
    if not len(sigma):
        return Spectrum(U, sigma)
    mass = held + torch.nn.functional.pad(sigma.double() ** power, (1, 0)).cumsum(0)
    # The small slack lets threshold 1 stop at the last real direction rather than ask for one more.
    enough = mass >= threshold * mass[-1] * (1 - 1e-12)
    rank = max(0, int(enough.nonzero()[0]) - below)
    return Spectrum(_orthonormal(outside(U[:, :rank], Phi)), sigma[:rank])


def append_basis(Phi: torch.Tensor, U: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Orthonormal columns that span Phi and U (Eq. 9): Phi's own, unchanged, then what U adds.

    Args:
        Phi: (d, q) orthonormal.
        U: (d, r) of any kind.
        tolerance: directions of U whose part outside Phi is shorter are dropped.
    """
    left, sigma, _ = torch.linalg.svd(outside(U, Phi), full_matrices=False)
    new = left[:, sigma > tolerance][:, : Phi.shape[0] - Phi.shape[1]]
    return torch.cat([Phi, _orthonormal(outside(new, Phi))], dim=1) if new.shape[1] else Phi


def sketch(A: torch.Tensor, columns: int, generator: torch.Generator) -> torch.Tensor:
    """A G (d, columns) of A (d, m), G standard normal (Eq. 40): in a sum over clients no direction is anyone's.

    Args:
        A: the columns, or directions times their singular values.
        columns: s, the sketch's width.
        generator: on the CPU.
    """
    G = torch.randn(A.shape[1], columns, generator=generator, dtype=torch.float64)
    return A @ G.to(A.device, A.dtype)


def span_of(B: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Orthonormal basis (d, r) of the range of B (d, s), less singular values below `tolerance` times the largest."""
    if not B.numel():
        return B[:, :0]
    left, sigma, _ = torch.linalg.svd(B, full_matrices=False)
    return left[:, sigma > tolerance * sigma[0]]


def _orthonormal(U: torch.Tensor) -> torch.Tensor:
    """Make almost orthonormal columns orthonormal to rounding; each keeps its direction."""
    if not U.shape[1]:
        return U
    Q, R = torch.linalg.qr(U)
    return Q * R.diagonal().sign()


class ProjectionAudit(Audit):
    """rho_t and beta_{tau -> t} at the models that the rounds of task t start from, before the average.

    rho_t = ||P g_t||^2 / ||g_t||^2, the share of the task's own gradient that remains after projection, and
    beta_{tau -> t} = ||P g_tau|| / ||g_tau||, the remaining share of an old task's gradient. P is the projector of the
    round, layer by layer; g is the gradient over all projected weights of the mean loss of each task's reference
    samples.

    Args:
        method: its knob `theory` is the number of reference samples per client and task.
    """

    def __init__(self, method: ProjectedMethod, context: Context) -> None:
        self._method = method
        self._context = context
        self._half = ModelHolder(method, context)
        #: "images.<task>" and "labels.<task>" of the reference samples, client by client.
        self._samples: dict[str, list[torch.Tensor]] = {}
        #: For the current task, per round and task tau <= t: (||P g||, ||g||).
        self._norms: list[list[tuple[float, float]]] = []
        self.rows = []

    def observe(self, task: Task, client_data: ClientData) -> None:
        """Record the first samples of a shard, in the data set's order."""
        count = self._method.theory
        for kind, values in (("images", client_data.inputs), ("labels", client_data.labels)):
            self._samples.setdefault(f"{kind}.{task.index}", []).append(values[:count].cpu())

    def look(self, task: Task, round_: int, server: Server) -> None:
        server = cast("ProjectedServer", server)
        if server.stage != MODEL:
            return
        half = self._half
        half.prepare(server.heads)
        # The server's network already includes the average; `sent` is the model at the start of the round.
        half.network.load({**server.network.state(), **server.sent})
        self._norms.append([self._norm(half.network, server, tau) for tau in range(task.index + 1)])

    def _norm(self, network: Network, server: ProjectedServer, tau: int) -> tuple[float, float]:
        """||P g_tau|| and ||g_tau||; 0 for a task without a reference sample."""
        if f"images.{tau}" not in self._samples:
            return 0.0, 0.0
        device = self._context.device
        images, labels = (torch.cat(self._samples[f"{kind}.{tau}"]).to(device) for kind in ("images", "labels"))
        network.zero_grad(set_to_none=True)
        network.eval()
        size = self._method.training.batch_size
        logits, position = server.heads.competition(self._method.loss_classes, server.tasks[tau], tau)
        with exact_kernels(), exact_attention(device):
            for batch, truth in zip(images.split(size), labels.split(size), strict=True):
                scores = network(self._half.trainer.standardise(batch))
                if logits is not None and position is not None:
                    scores, truth = scores[:, logits.to(device)], position.to(device)[truth]
                (torch.nn.functional.cross_entropy(scores, truth, reduction="sum") / len(images)).backward()
        whole = left = 0.0
        own = dict(network.named_parameters())
        for name, layer in self._method.protected_weights(network, server.heads.reused).items():
            gradient = own[name].grad
            if gradient is None:
                continue
            Phi = server.known(layer)
            gradient = gradient.double()
            whole += float(gradient.square().sum())
            left += float((project_out(gradient, Phi) if Phi.shape[1] else gradient).square().sum())
        return left**0.5, whole**0.5

    def report(self, task: Task, server: Server, everything: FullData) -> None:
        """One row: `rho` (mean over rounds), `rho_min`; `beta`, `beta_max` over old tasks; `beta_<tau>` of each."""
        server = cast("ProjectedServer", server)
        rounds, self._norms = self._norms, []
        ratio = [[left / whole if whole else None for left, whole in norms] for norms in rounds]
        rho = [values[-1] ** 2 for values in ratio if values[-1] is not None]
        row: dict[str, float | None] = {"rho": _mean(rho), "rho_min": min(rho, default=None)}
        old = {tau: [v for values in ratio if (v := values[tau]) is not None] for tau in range(task.index)}
        every = [value for values in old.values() for value in values]
        row |= {"beta": _mean(every), "beta_max": max(every, default=None)}
        self.rows.append(row | {f"beta_{tau}": _mean(values) for tau, values in old.items()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        norms = torch.tensor(self._norms, dtype=torch.float64)
        return {**{name: torch.cat(parts) for name, parts in self._samples.items()}, "norms": norms}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._samples = {name: [value] for name, value in state.items() if name != "norms"}
        self._norms = [[(left, whole) for left, whole in norms] for norms in state["norms"].tolist()]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
