"""Small clients beside a plain loop: the sides take the same steps, and the command prints its table."""

from __future__ import annotations

import re
import sys

import pytest
import small_clients
import torch


@pytest.mark.slow
def test_all_sides_of_small_clients_end_with_the_same_model(tmp_path, monkeypatch, capsys):
    setting = small_clients.Setting(clients=2, samples=5, side=8, backbone="tiny", rounds=2)
    models = {name: side() for name, side in small_clients.sides_of(setting).items()}
    assert set(models) == {"rounds", "plain", "loaded", "bare"}
    assert small_clients.apart(models["rounds"], setting.network().state()) > 1e-3
    for name in ("plain", "loaded"):
        assert small_clients.apart(models["rounds"], models[name]) < 1e-5
    command = ["small_clients.py", "--cases", "2x5", "--rounds", "1", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    threads = torch.get_num_threads()
    small_clients.main()
    torch.set_num_threads(threads)
    assert re.search(r"\| 2 x 5 \|( [0-9.]+ ms \|){4}( [0-9.]+ \|){3}\n", capsys.readouterr().out)
    assert (tmp_path / "small-clients-tiny-8.json").is_file()


def test_sides_that_train_other_models_are_not_compared(monkeypatch):
    setting = small_clients.Setting(clients=2, samples=5, side=8, backbone="tiny", rounds=1)
    monkeypatch.setattr(setting, "rounds", lambda: {name: own + 1 for name, own in setting.network().state().items()})
    with pytest.raises(SystemExit, match="models that are"):
        small_clients.measured(setting, 1)
