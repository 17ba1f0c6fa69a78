"""How much of TIP's error is stale references: route a finished run's test samples with references made at its end.

    python -m benchmarks fresh_references outputs/runs/fedprotip-... [...]

Fresh ones need the old tasks' data under the last model, which no client has any more: they show what references could
do at best, by sample and by task-pure batches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from fcl_bench.config import load_settings
from fcl_bench.data.images.batches import Standardise
from fcl_bench.execution.folder import RunFolder
from fcl_bench.execution.inputs import load_images
from fcl_bench.execution.plan import Plan, make_plan
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.task_identity import relevance, route
from fcl_bench.training.network import Network
from fcl_bench.training.trainer import Trainer


def share_right(
    omega: list[torch.Tensor], references: torch.Tensor, known: torch.Tensor, batch: int | None, seed: int = 0
) -> float:
    """Percent of each task's test samples (or shuffled batches of them) that are routed to it; mean over tasks."""
    shares = []
    for task, rows in enumerate(omega):
        if batch is not None:
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
            rows = torch.stack([part.mean(dim=0) for part in rows[order].split(batch)])
        shares.append(100 * float((route(rows, references, known) == task).double().mean()))
    return float(np.mean(shares))


def fresh(plan: Plan, omega: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, T, T) means of `omega` (n, T) over every client's samples of every task, and (K, T) whether it has any."""
    tasks, clients = len(plan.dealt.shards), len(plan.dealt.shards[0])
    references, known = torch.zeros(clients, tasks, tasks), torch.zeros(clients, tasks, dtype=torch.bool)
    for task, shards in enumerate(plan.dealt.shards):
        for client, indices in enumerate(shards):
            if len(indices):
                references[client, task] = omega[torch.from_numpy(indices)].mean(dim=0)
                known[client, task] = True
    return references, known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for folder in parser.parse_args().runs:
        plan = make_plan(load_settings(OmegaConf.create(RunFolder(folder).config())))
        method, start = plan.settings.method, plan.context.network
        assert isinstance(method, FedProTIP), f"{folder} is no run of fedprotip"
        assert start is not None
        model, network = load_file(folder / "model.safetensors"), Network(start)
        network.load({name: value for name, value in model.items() if name.startswith("body.")})
        trainer = Trainer(method.training, Standardise(start.size, start.mean, start.std), torch.device("cpu"))
        bases = [model[f"basis.{task}.heads"] for task in range(len(plan.dealt.shards))]
        train, test = (relevance(trainer.features(network, images), bases) for images in load_images(plan))
        references = fresh(plan, train)
        tests = [test[torch.from_numpy(indices)] for indices in plan.dealt.stream.test]
        one, many = (share_right(tests, *references, batch) for batch in (None, 64))
        settings = plan.settings
        setting = f"beta {settings.beta:g}, seed {settings.scalars.seed}, threshold {method.threshold:g}"
        print(f"{folder.name} ({setting}): right by sample {one:.1f} %, by task-pure batch of 64 {many:.1f} %")


if __name__ == "__main__":
    main()
