"""fed-mammoth (aimagelab/fed-mammoth): its own loop `utils.training.train` with its model `fedavg` and its Fabric.

It needs the package lightning. Not theirs: the loaders hold tensors that are in memory (theirs opens and resizes each
image with Pillow), and evaluation and pictures do nothing. Stubs: wandb, _datasets._utils, and the vision transformers
_networks.vit and _networks.vit_prompt_hgp, with which `fedavg` only compares the network's type; _models and _networks
without their `__init__`, which import every model and every network.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.peers.borrowed import SameOrder, package, stub, use
from benchmarks.peers.settings import Averaging, Row
from benchmarks.peers.work import Work, flat


class OneClient(torch.utils.data.Dataset):
    """A client's images and labels, under the names that it asks for."""

    def __init__(self, client: int, data: torch.Tensor, targets: torch.Tensor) -> None:
        self.client, self.data, self.targets = client, data, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[index], self.targets[index]


def prepared(row: Row, checkout: Path) -> Work:
    """A server, and a model for each client."""
    assert isinstance(row, Averaging)
    training, FedAvg, BaseNetwork = imported(checkout)
    import lightning

    class Net(BaseNetwork):  # type: ignore[misc, valid-type]
        """Our model behind its base class."""

        def __init__(self) -> None:
            super().__init__()
            self.model = row.model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy="dp", precision="32-true")
    fabric.launch()
    server, *clients = (FedAvg(fabric, Net(), "cpu", optimizer="SGD", lr=row.lr) for _ in range(1 + row.clients))
    SameOrder(row, lambda own: own.client)
    dataset = loaders_of(row)
    options = arguments(row)
    return Work(
        lambda: training.train(fabric, server, clients, dataset, options, ""), lambda: flat(server.network.parameters())
    )


def imported(checkout: Path):
    """Its loop, its model and the base class of its networks."""
    use(checkout)
    stub("wandb", "_datasets", "_datasets._utils", "_networks.vit", "_networks.vit_prompt_hgp")
    for name in ("_models", "_networks"):
        decorator = {f"register_{name[1:-1]}": lambda _: lambda own: own}
        package(name, checkout / name, **decorator)
    training = importlib.import_module("utils.training")
    training.evaluate = lambda *_, **__: [0.0, [0.0]]
    training.accs_and_forgetting_matrix = lambda *_, **__: []
    model = importlib.import_module("_models.fedavg").FedAvg
    return training, model, importlib.import_module("_networks._utils").BaseNetwork


def loaders_of(row: Averaging) -> SimpleNamespace:
    """One task, as its data sets present themselves."""
    parts = [OneClient(client, *own) for client, own in enumerate(row.parts(row.images))]
    loaders = [torch.utils.data.DataLoader(part, row.batch, shuffle=True) for part in parts]
    return SimpleNamespace(
        N_TASKS=1,
        N_CLASSES_PER_TASK=row.classes,
        IS_TEXT=False,
        get_cur_dataloaders=lambda task: (loaders, loaders),
        train_transform=lambda x: x,
        test_transform=lambda x: x,
    )


def arguments(row: Averaging) -> dict:
    """What its command line would have set."""
    return {
        "num_clients": row.clients,
        "participation_rate": 1,
        "num_comm_rounds": row.rounds,
        "num_epochs": row.epochs,
        "checkpoint": None,
        "checkpoint_interval": 1,
        "save_models": False,
        "debug_mode": True,
        "validation_interval": 0,
        "test_local": False,
        "test_local_transfer": False,
        "wandb": False,
    }
