"""The names under which bases of protected subspaces travel."""

from __future__ import annotations

import torch

from fcl_bench.protocol.message import Message

#: Prefix of the names of a task's bases that still grow. The number of the turn, the task and the layer follow.
PART = "part"


def basis_name(task: int, layer: str) -> str:
    """The name under which Phi_layer^(task) travels."""
    return f"basis.{task}.{layer}"


def bases_in(broadcast: Message, layer: str) -> torch.Tensor | None:
    """Phi^(1:t-1) (d_l, q) of a layer as a client has it, and the existing part of Phi^(t); None if there is none."""
    named = {name: name.split(".", 2) for name in broadcast if name.startswith(("basis.", PART))}
    found = {int(task): broadcast[name] for name, (_, task, of) in named.items() if of == layer}
    return torch.cat([found[task] for task in sorted(found)], dim=1) if found else None
