"""Public code beside ours: processes, alternation, stubs and the table, on made-up checkouts and the plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.peers import borrowed
from benchmarks.peers.__main__ import main
from benchmarks.peers.measure import Measured
from benchmarks.peers.settings import ROWS
from benchmarks.peers.sides import SIDES
from benchmarks.peers.table import disagreements, losses, markdown

#: AFL's interface over least squares on everyone's samples at once, which is what AFL is to give; with a print, and a
#: GPU that is not there.
AFL = """
import torch

def init_local(args):
    return torch.nn.Linear(args.feat_size, args.num_classes).cuda()

def local_update(train_loader, model, global_model, args):
    print("Training locally!")
    batches = list(train_loader)
    X = torch.cat([model(x.cuda(args.gpu, non_blocking=True)) for x, _ in batches])
    labels = torch.cat([y for _, y in batches])
    return X.double(), torch.nn.functional.one_hot(labels, args.num_classes).double(), args.rg

def aggregation(X, Y, C, args):
    return torch.linalg.lstsq(torch.cat(X), torch.cat(Y)).solution, None, C

def clean_regularization(W, C, args):
    assert len(C) == args.num_clients
    return W
"""


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory) -> Path:
    """AFL's, and one of PFLlib without a file."""
    folder = tmp_path_factory.mktemp("checkouts")
    (folder / "PFLlib").mkdir()
    (folder / "Analytic-federated-learning").mkdir()
    (folder / "Analytic-federated-learning" / "afl.py").write_text(AFL)
    return folder


def test_sides_take_turns_and_what_is_missing_is_told(checkouts, tmp_path, capfd):
    wanted = ["--size", "smoke", "--rows", "k100,afl_k10", "--repeats", "2", "--out", str(tmp_path)]
    assert main([*wanted, "--peers", str(checkouts)]) == 0
    said = capfd.readouterr().out
    for name in ("FL-bench", "fed-mammoth"):
        repository = next(side.repository for side in SIDES.values() if side.title == name)
        assert f"{name}: not measured, no {checkouts / name}: git clone https://github.com/{repository}" in said
    assert "PFLlib: not measured, exit code 1: ModuleNotFoundError: No module named 'flcore'" in said
    assert "Training locally!" not in said
    result = json.loads((tmp_path / "peers.json").read_text())
    sides = {name: [side["side"] for side in row["sides"]] for name, row in result["rows"].items()}
    assert sides == {"k100": ["ours", "plain"], "afl_k10": ["ours", "afl"]}
    assert result["commits"]["ZHUANGHP/Analytic-federated-learning"] == "unknown"
    for name, row in result["rows"].items():
        for side in row["sides"]:
            assert len(side["seconds"]) == 2
            assert min(side["seconds"]) > 0
            assert (side["apart"] == 0) == (side["side"] == "ours")
            # The plain loop takes the same steps, and AFL is least squares.
            assert side["apart"] < ROWS["smoke"][name].tolerance
    assert (tmp_path / "peers.md").read_text() in said


def test_a_row_that_does_not_exist_is_an_error_with_those_that_do(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--rows", "k100,k7"])
    assert ended.value.code == 2
    assert "--rows=k7: there is no such row (the rows are large, k100" in capsys.readouterr().err


def test_the_table_tells_ratios_of_alternations_and_every_loss():
    row = ROWS["full"]["k100"]
    ours = Measured("ours", [1.0, 2.0, 4.0], 30 * 2**20)
    faster = Measured("plain", [2.0, 2.0, 2.0], 60 * 2**20, 1e-7)
    slower = Measured("pfllib", [0.8, 1.0, 5.0], 20 * 2**20, 2e-4)
    rows = [(row, [ours, faster, slower])]
    text = markdown(rows).splitlines()
    assert text[3] == "|  | a plain loop | 2 (2 to 2) | 1 (0.5 to 2) | 60 | 0.50 | 1e-07 |"
    assert text[4] == "|  | PFLlib | 1 (0.8 to 5) | 1.2 (0.8 to 2) | 20 | 1.50 | 0.0002 |"
    assert list(losses(rows)) == [
        f"{row}: fcl-bench needs 1.25 times the processor seconds of PFLlib.",
        f"{row}: fcl-bench needs 1.50 times the memory of PFLlib.",
    ]
    (only,) = disagreements(rows)
    assert "PFLlib is 0.0002 away" in only
    assert list(disagreements([(row, [ours, Measured("plain", [1.0], 1, float("nan"))])]))


def test_shuffling_loaders_take_our_clients_order_of_samples(monkeypatch):
    monkeypatch.setattr(torch.utils.data.dataloader, "RandomSampler", torch.utils.data.RandomSampler)
    row = ROWS["smoke"]["large"]
    borrowed.SameOrder(row, lambda subset: subset.indices[0] // row.samples)
    everyone = torch.utils.data.TensorDataset(torch.arange(len(row.labels)))
    loaders = [
        torch.utils.data.DataLoader(torch.utils.data.Subset(everyone, own), 4, shuffle=True) for own in row.shards
    ]
    seen = [[batch.tolist() for (batch,) in loaders[client]] for _ in range(row.rounds) for client in range(2)]
    wanted = [
        [(batch + client * row.samples).tolist() for epoch in row.batches(client, round_) for batch in epoch]
        for round_ in range(row.rounds)
        for client in range(2)
    ]
    assert seen == wanted
    assert wanted[0] != wanted[2]


def test_stubs_may_be_imported_but_not_called(monkeypatch):
    for name in ("made_up", "made_up.inside"):
        monkeypatch.setitem(borrowed.sys.modules, name, None)
    borrowed.stub("made_up", "made_up.inside")
    from made_up.inside import Anything

    assert torch.nn.Linear is not Anything
    with pytest.raises(RuntimeError, match="stub"):
        Anything()
