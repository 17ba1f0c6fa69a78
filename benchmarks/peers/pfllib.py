"""PFLlib (TsingZ0/PFLlib): its server's own loop `FedAvg.train` with its clients `clientAVG`.

Not theirs: `read_client_data` hands out tensors that are in memory (theirs reads and unpickles a file per client and
round), and evaluation and saving do nothing. Stubs: h5py, utils.dlg (files of results, an attack).
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.peers.borrowed import SameOrder, stub, use
from benchmarks.peers.settings import Averaging, Row
from benchmarks.peers.work import Work, flat


class OneClient(list):
    """Pairs (image, label), as `read_client_data` returns them, of a client."""

    client: int


def prepared(row: Row, checkout: Path) -> Work:
    """A server with all its clients."""
    assert isinstance(row, Averaging)
    base, server = imported(checkout)
    everyone = []
    for client, part in enumerate(row.parts(row.images)):
        pairs = OneClient(zip(*part, strict=True))
        pairs.client = client
        everyone.append(pairs)

    def read_client_data(dataset: str, idx: int, is_train: bool = True, few_shot: int = 0) -> list:
        return everyone[idx] if is_train else everyone[idx][:1]

    for module in (base, server.serverbase):
        module.read_client_data = read_client_data
    SameOrder(row, lambda samples: samples.client)
    federation = server.Trained(arguments(row), times=0)
    return Work(federation.train, lambda: flat(federation.global_model.parameters()))


def imported(checkout: Path):
    """Its modules, once."""
    use(checkout / "system")
    stub("h5py", "utils.dlg")
    base = importlib.import_module("flcore.clients.clientbase")
    server = importlib.import_module("flcore.servers.serveravg")
    server.serverbase = importlib.import_module("flcore.servers.serverbase")

    class Trained(server.FedAvg):
        """Trains, and does nothing else."""

        def evaluate(self, acc=None, loss=None) -> None:
            self.rs_test_acc.append(0.0)
            # It averages the seconds of all rounds but the first; here may be one only.
            self.Budget.append(0.0)

        def save_results(self) -> None:
            pass

        def save_global_model(self) -> None:
            pass

    server.Trained = Trained
    return base, server


def arguments(row: Averaging) -> argparse.Namespace:
    """What its command line would have set: all clients in every round, none slow or dropped. It runs one round more
    than it is told."""
    return argparse.Namespace(
        model=row.model().train(),
        algorithm="FedAvg",
        dataset="made",
        device="cpu",
        save_folder_name="",
        num_classes=row.classes,
        batch_size=row.batch,
        local_learning_rate=row.lr,
        local_epochs=row.epochs,
        few_shot=0,
        learning_rate_decay=False,
        learning_rate_decay_gamma=1.0,
        global_rounds=row.rounds - 1,
        num_clients=row.clients,
        join_ratio=1.0,
        random_join_ratio=False,
        time_select=False,
        time_threthold=1e9,
        goal="",
        top_cnt=100,
        auto_break=False,
        eval_gap=1,
        client_drop_rate=0.0,
        train_slow_rate=0.0,
        send_slow_rate=0.0,
        dlg_eval=False,
        dlg_gap=1,
        batch_num_per_client=1,
        num_new_clients=0,
        fine_tuning_epoch_new=0,
    )
