"""Local training whose every step is projected out of protected subspaces (FedProTIP Eq. 4-5)."""

from __future__ import annotations

import torch

from fcl_bench.linalg.subspace import Projection
from fcl_bench.methods.projection.projected import ProjectedMethod, ProjectedObjective
from fcl_bench.training.network import Heads, Network


class ProjectedDescent(ProjectedObjective):
    """Every update of a weight W stays orthogonal to its layer's protected inputs: (W_new - W_old) Phi = 0 (Eq. 4-5).

    The gradient is projected with weight decay in it, so that momentum adds up projected steps only (erratum 3). At the
    end of a round the whole update is projected once more, since float32 rounds every step.

    Args:
        heads: see `Objective`.
        method, network, later: see `ProjectedObjective`.
        projections: of parameters, by name.
        exact: False: the gradient alone is projected, as Eq. 4 has it, and weight decay pulls as it does elsewhere.
    """

    def __init__(
        self,
        heads: Heads,
        method: ProjectedMethod,
        network: Network,
        later: bool,
        projections: dict[str, Projection],
        exact: bool = True,
    ) -> None:
        super().__init__(heads, method, network, later)
        self._outside, self._exact = 0.0 if exact else method.decay, exact
        own = dict(network.named_parameters())
        self._projected = [(own[name], project, own[name].detach().clone()) for name, project in projections.items()]

    @torch.no_grad()
    def modify_gradients(self, network: Network) -> None:
        for weight, project, _ in self._projected:
            if weight.grad is not None:
                if self._outside:
                    weight.grad.sub_(weight, alpha=self._outside)
                project(weight.grad)
                if self._outside:
                    weight.grad.add_(weight, alpha=self._outside)
        super().modify_gradients(network)  # last: rows at rest have no weight decay that could be left out above

    @torch.no_grad()
    def finish(self, network: Network) -> None:
        if not self._exact:
            return
        for weight, project, before in self._projected:
            weight.sub_(before)
            project(weight)
            weight.add_(before)
