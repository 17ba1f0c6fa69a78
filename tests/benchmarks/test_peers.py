"""Public code beside ours: processes, alternation, stubs and the table, on made-up checkouts and the plain loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.peers import __main__ as command
from benchmarks.peers import borrowed, ours, plain
from benchmarks.peers.__main__ import main
from benchmarks.peers.measure import Child, Failed, Measured
from benchmarks.peers.settings import ROWS, Statistics
from benchmarks.peers.sides import SIDES
from benchmarks.peers.table import disagreements, losses, markdown
from benchmarks.peers.work import flat

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


@pytest.mark.slow
def test_sides_take_turns_and_what_is_missing_is_told(tmp_path, monkeypatch, capfd):
    checkouts, out = tmp_path / "checkouts", tmp_path / "out"
    (checkouts / "STSA").mkdir(parents=True)
    (checkouts / "Analytic-federated-learning").mkdir()
    (checkouts / "Analytic-federated-learning" / "afl.py").write_text(AFL)
    monkeypatch.setattr(Statistics, "peers", ("afl", "stsa", "fl_bench"))
    wanted = ["--size", "smoke", "--rows", "afl_k10", "--repeats", "2", "--out", str(out)]
    assert main([*wanted, "--peers", str(checkouts)]) == 0
    said = capfd.readouterr().out
    assert f"FL-bench: not measured, no {checkouts / 'FL-bench'}: git clone https://github.com/KarhouTam/FL-b" in said
    assert "STSA's code: not measured, exit code 1: ModuleNotFoundError: No module named 'methods'" in said
    assert "Training locally!" not in said
    result = json.loads((out / "peers.json").read_text())
    assert result["commits"] == {"Yuqin-G/STSA": "unknown", "ZHUANGHP/Analytic-federated-learning": "unknown"}
    ours_, theirs = result["rows"]["afl_k10"]["sides"]
    assert (ours_["side"], theirs["side"], ours_["apart"]) == ("ours", "afl", 0)
    for side in (ours_, theirs):
        assert len(side["seconds"]) == 2
        assert min(side["seconds"]) > 0
    # AFL is least squares; what travels is in float32.
    assert 0 < theirs["apart"] < 1e-5
    assert (out / "peers.md").read_text() in said


@pytest.mark.slow
def test_the_plain_loop_takes_our_steps():
    row = ROWS["smoke"]["large"]
    first = flat(row.model().parameters())
    ended = []
    for side in (ours, plain):
        work = side.prepared(row, Path())
        work.run()
        ended.append(work.result())
    torch.testing.assert_close(*ended, rtol=0, atol=1e-6)
    assert (ended[0] - first).abs().max() > 1e-3


def test_our_own_failure_is_a_line(tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise Failed("fcl-bench: not measured, exit code -9: no message")

    monkeypatch.setattr(command, "measured", killed)
    with pytest.raises(SystemExit, match="exit code -9"):
        main(["--size", "smoke", "--rows", "stsa", "--out", str(tmp_path)])


def test_a_side_that_is_killed_between_its_turns_is_left_out(monkeypatch):
    """By the system, where memory is short: nothing that has been measured is lost."""
    begun = subprocess.Popen
    gone = [sys.executable, "-c", "print('{}')"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **named: begun(gone, **named))
    with Child(SIDES["plain"], Path(), "smoke", "large", 1) as child:
        child.answer()
        child._process.wait()
        with pytest.raises(Failed, match="a plain loop: not measured, exit code 0"):
            child.ask("turn")


def test_ours_keeps_freed_memory_as_the_command_does(monkeypatch):
    calls: list[bool] = []
    monkeypatch.setattr(ours, "reuse_freed_memory", lambda: calls.append(True))
    ours.prepared(ROWS["smoke"]["stsa"], Path())
    assert calls


def test_a_row_that_does_not_exist_is_an_error_with_those_that_do(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--rows", "k100,k7"])
    assert ended.value.code == 2
    assert "--rows=k7: there is no such row (the rows are large, k100" in capsys.readouterr().err


def test_the_table_tells_ratios_of_alternations_and_every_loss():
    row = ROWS["full"]["k100"]
    first = Measured("ours", [1.0, 2.0, 4.0], 30 * 2**20)
    faster = Measured("plain", [2.0, 2.0, 2.0], 60 * 2**20, 1e-7)
    slower = Measured("pfllib", [0.8, 1.0, 5.0], 20 * 2**20, 2e-4)
    rows = [(row, [first, faster, slower])]
    text = markdown(rows).splitlines()
    assert text[3] == "|  | a plain loop | 2 (2 to 2) | 1.00 (0.50 to 2.00) | 60 | 0.50 | 1e-07 |"
    assert text[4] == "|  | PFLlib | 1 (0.8 to 5) | 1.25 (0.80 to 2.00) | 20 | 1.50 | 0.0002 |"
    assert list(losses(rows)) == [
        f"{row}: fcl-bench needs 1.25 times the processor seconds of PFLlib.",
        f"{row}: fcl-bench needs 1.50 times the memory of PFLlib.",
    ]
    (only,) = disagreements(rows)
    assert "PFLlib is 0.0002 away" in only
    assert list(disagreements([(row, [first, Measured("plain", [1.0], 1, float("nan"))])]))


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

    with pytest.raises(RuntimeError, match="stub"):
        Anything()
