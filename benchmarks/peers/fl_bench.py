"""FL-bench (KarhouTam/FL-bench): its server's own loop `FedAvgServer.train`, its serial trainer, client and data set.

Not theirs: the server is filled here instead of from files (model, partition, data), and evaluation and reports are off
by its own switches or do nothing. Stubs: ray (its other mode), pynvml (the choice of a GPU).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.peers.borrowed import SameOrder, stub, use
from benchmarks.peers.settings import Averaging, Row
from benchmarks.peers.work import Work, flat


def prepared(row: Row, checkout: Path) -> Work:
    """A server with its one worker."""
    assert isinstance(row, Averaging)
    use(checkout)
    stub("ray", "ray.actor", "pynvml")
    modules = {name: importlib.import_module(name) for name in ("src.server.fedavg", "src.utils.models")}
    data = importlib.import_module("data.utils.datasets")
    SameOrder(row, lambda subset: subset.indices[0] // row.samples)
    server = filled(row, modules["src.server.fedavg"].FedAvgServer, modules["src.utils.models"].DecoupledModel, data)
    names = [f"{part}.{name}" for part in ("base", "classifier") for name in parameters_of(row, part)]
    return Work(server.train, lambda: flat(server.public_model_params[name] for name in names))


def parameters_of(row: Averaging, part: str) -> list[str]:
    """Their names: batch norms' statistics are parameters, too, in its models."""
    body, head = row.model()
    return [name for name, _ in (body if part == "base" else head).named_parameters()]


def filled(row: Averaging, FedAvgServer: type, DecoupledModel: type, data):
    """A server as its `__init__` leaves it, with its own `init_model` and `init_trainer`."""

    class Trained(FedAvgServer):  # type: ignore[misc, valid-type]
        """Trains, and reports nothing."""

        def __init__(self) -> None:
            pass

        def display_metrics(self) -> None:
            pass

    everyone = list(range(row.clients))
    server = Trained()
    server.args = settings(row)
    server.device = torch.device("cpu")
    server.client_num, server.train_clients = row.clients, everyone
    server.client_optimizer_states = {client: {} for client in everyone}
    server.client_lr_scheduler_states = {client: {} for client in everyone}
    server.client_local_epoches = [row.epochs] * row.clients
    server.client_sample_stream = [everyone] * row.rounds
    server.client_metrics = {client: {} for client in everyone}
    server.train_progress_bar = range(row.rounds)
    server.logger = SimpleNamespace(log=lambda *_, **__: None)
    server.testing = False
    server.dataset = data.BaseDataset(row.images, row.labels, list(range(row.classes)))
    # Everything is there to train on; of the rest nobody has anything.
    server.client_data_indices = [{"train": own.tolist(), "val": [], "test": []} for own in row.shards]
    model = DecoupledModel()
    model.base, model.classifier = row.model()
    server.init_model(model)
    server.init_trainer()
    return server


def settings(row: Averaging):
    """What its YAML would have set."""
    from omegaconf import OmegaConf

    off = {"interval": -1, "train": False, "val": False, "test": False}
    return OmegaConf.create(
        {
            "mode": "serial",
            "dataset": {"name": "made"},
            "model": {"external_model_weights_path": None},
            "lr_scheduler": {"name": None},
            "optimizer": {"name": "sgd", "lr": row.lr, "momentum": 0, "weight_decay": 0},
            "common": {
                "batch_size": row.batch,
                "local_epoch": row.epochs,
                "global_epoch": row.rounds,
                "buffers": "global",
                "reset_optimizer_on_global_epoch": True,
                "client_side_evaluation": False,
                "verbose_gap": row.rounds + 1,
                "use_cuda": False,
                "test": {"client": {**off, "finetune_epoch": 0}, "server": off},
            },
        }
    )
