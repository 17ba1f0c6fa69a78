"""The two quantities of FedProTIP's bounds, estimated on real gradients (Assumptions 4 and 5, Fig. 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from fcl_bench.environment import exact_attention, exact_kernels
from fcl_bench.methods.gradient.client import MODEL, ModelHolder
from fcl_bench.methods.projection.subspace import project_out
from fcl_bench.protocol.audit import Audit, FullData
from fcl_bench.protocol.context import ClientData, Context, Task
from fcl_bench.protocol.method import Server
from fcl_bench.training.network import Network

if TYPE_CHECKING:
    from fcl_bench.methods.projection.projected import ProjectedMethod, ProjectedServer


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
