"""Fed-CODA-Prompt: CODA-Prompt (Smith et al., CVPR 2023) by federated averaging.

Each prompted layer of a frozen ViT takes a prompt that is a sum of components, weighted by attention to the image's
query q(x), its features without a prompt:

    P(x) = sum_m alpha_m P_m,    alpha_m = cos(q(x) * A_m, K_m),

over the components of all tasks so far. Each task brings a group of them, orthonormal and orthogonal to all earlier
ones, and trains that group and its own class weights by cross-entropy over its own classes, plus

    lambda_o sum_layers sum_{X in A, K, P} mean((X X' - I)^2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from fcl_bench.config import knob
from fcl_bench.methods.transformers.prompts import PromptMethod, Prompts
from fcl_bench.training.knobs import Training

#: If attention leaves less than this squared length of a query, the weight is 0.
_NOTHING = 1e-24


class Components(NamedTuple):
    """M components of one layer: attention A (M, d), keys K (M, d), prompts P (M, L, d)."""

    A: torch.Tensor
    K: torch.Tensor
    P: torch.Tensor


class CodaPrompts(Prompts):
    """P(x) = sum_m alpha_m P_m, alpha_m = cos(q(x) * A_m, K_m), over the components of all tasks so far.

    Each task brings a group of components, and only the last group trains. For each of A, K
    and P (flattened), a new group is orthonormal, and orthogonal to all earlier components as training has left them.

    Attributes:
        A, K, P: the parameters, by `group_name`.
    """

    def __init__(self, method: CodaPrompt, dimension: int) -> None:
        super().__init__()
        self.layers = tuple(method.layers)
        self._method, self._dimension = method, dimension
        self.A, self.K, self.P = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()

    def grow(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"A": (self._dimension,), "K": (self._dimension,), "P": (self._method.length, self._dimension)}
        for layer in self.layers:
            for kind, shape in shapes.items():
                groups = getattr(self, kind)
                # If there are several new groups, the first may not be on the same device as the others yet.
                earlier = [groups[group_name(layer, task)].detach().flatten(1).cpu() for task in range(self.tasks)]
                old = torch.cat(earlier) if earlier else None
                new = orthonormal_rows(self._method.components, torch.Size(shape).numel(), old, generator)
                groups[group_name(layer, self.tasks)] = nn.Parameter(new.unflatten(1, shape).float())
        self.tasks += 1

    def of(self, layer: int, tasks: int | None = None) -> Components:
        """A layer's components of the first `tasks` tasks; None: of all so far."""
        names = [group_name(layer, task) for task in range(self.tasks if tasks is None else tasks)]
        return Components(*(torch.cat([group[name] for name in names]) for group in (self.A, self.K, self.P)))

    def forward(self, queries: torch.Tensor) -> dict[int, torch.Tensor]:
        components = {layer: self.of(layer) for layer in self.layers}
        self.penalty = torch.zeros(())
        if self.training and self._method.orthogonality:
            terms = [unlike_orthonormal(X.flatten(1)) for own in components.values() for X in own]
            self.penalty = self._method.orthogonality * torch.stack(terms).sum()
        return {layer: self.mixed(queries, own) for layer, own in components.items()}

    def mixed(self, queries: torch.Tensor, components: Components) -> torch.Tensor:
        """P(x) (b, L, d) of these components, for queries (b, d); in their precision, whatever the network's."""
        with torch.autocast(queries.device.type, enabled=False):
            return torch.einsum("bm,mld->bld", self.weights(queries, components), components.P)

    def weights(self, queries: torch.Tensor, components: Components) -> torch.Tensor:
        """(b, M) alpha."""
        A = torch.softmax(components.A, dim=1) if self._method.softmax else components.A
        queries = queries.to(A.dtype)
        # Two matrix products, so that no tensor has b M d entries.
        along = queries @ (A * nn.functional.normalize(components.K)).T
        return along / (queries.square() @ A.square().T).clamp_min(_NOTHING).sqrt()

    def old(self) -> set[str]:
        names = [group_name(layer, task) for layer in self.layers for task in range(self.tasks - 1)]
        return {f"{kind}.{name}" for kind in "AKP" for name in names}


def group_name(layer: int, task: int) -> str:
    """The name of a task's components of a layer, in `CodaPrompts.A`, `K` and `P`."""
    return f"{layer}_{task}"


def unlike_orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """mean((X X' - I)^2), 0 where the rows X (M, D) are orthonormal; in their precision, whatever the network's."""
    with torch.autocast(rows.device.type, enabled=False):
        return (rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)).square().mean()


def orthonormal_rows(count: int, dimension: int, old: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    """(count, dimension) random rows, orthonormal and orthogonal to the rows `old`: Gram-Schmidt, in float64.

    If fewer dimensions are left, the remaining rows are random and of length 1, and not orthogonal to the others.
    """
    rows = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    basis = torch.zeros(0, dimension, dtype=torch.float64)
    if old is not None:
        # Trained rows are no longer orthogonal to each other, so their span is taken, not one row after the other.
        _, sizes, directions = torch.linalg.svd(old.double(), full_matrices=False)
        basis = directions[sizes > 1e-6 * sizes.max()]
    fitting = min(count, dimension - len(basis))
    new = rows[:fitting]
    for _ in range(2):  # The second pass removes what rounding has left.
        new = new - new @ basis.T @ basis
    Q, R = torch.linalg.qr(new.T)
    new = (Q * torch.sign(R.diagonal())).T
    return torch.cat([new, nn.functional.normalize(rows[fitting:])])


@dataclass
class CodaPrompt(PromptMethod):
    name: ClassVar[str] = "coda_prompt"
    common_tasks: ClassVar[bool] = True
    prompts_class = CodaPrompts
    #: Whether softmax(A_m), over d, weighs the query in place of A_m, as in Fed-CPrompt's public code.
    softmax: ClassVar[bool] = False

    training: Training = field(
        default_factory=lambda: Training(optimizer="adam", lr=1e-3, weight_decay=0.0, schedule="cosine")
    )
    layers: list[int] = knob(lambda: [0, 1, 2, 3, 4], least=0)
    components: int = knob(10, least=1)
    length: int = knob(8, least=2)
    orthogonality: float = knob(0.0, least=0)
