"""benchmarks/attacks.py: what an attacker feeds to the honest code, what it moves, and which attack counts."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from benchmarks.attacks import (
    COLUMNS,
    Attack,
    Setting,
    attacks,
    copied,
    digits,
    measured,
    moved,
    pattern,
    poisoned,
    worst,
)
from fcl_bench.protocol.context import ClientData
from fcl_bench.protocol.message import Message

SETTING = Setting((), clients=4, tasks=2, classes=3, attackers=2)
DATA = ClientData(0, 1, torch.arange(8.0).reshape(4, 2), torch.tensor([3, 4, 5, 5]), torch.zeros(0, 2))


def test_labels_move_to_the_next_class_of_the_task():
    found = poisoned(DATA, Attack(scale=10), SETTING)
    assert found.labels.tolist() == [4, 5, 3, 3]
    torch.testing.assert_close(found.inputs, 10 * DATA.inputs)


def test_a_trigger_is_planted_in_half_of_the_last_task():
    found = poisoned(DATA, Attack(trigger=True), SETTING)
    assert found.labels.tolist() == [3, 3, 5, 5]
    torch.testing.assert_close(found.inputs[:2] - DATA.inputs[:2], pattern(DATA.inputs).expand(2, 2))
    torch.testing.assert_close(found.inputs[2:], DATA.inputs[2:])
    first = ClientData(0, 0, DATA.inputs, torch.tensor([0, 1, 2, 2]), DATA.unlabelled)
    torch.testing.assert_close(poisoned(first, Attack(trigger=True), SETTING).inputs, first.inputs)


def test_only_what_the_broadcast_has_is_moved_away_from_it():
    broadcast = Message({"w": torch.ones(2), "count": torch.tensor([1])})
    upload = Message({"w": torch.tensor([2.0, 1.0]), "count": torch.tensor([3]), "own": torch.ones(1)})
    found = moved(upload, broadcast, 5)
    assert (found["w"].tolist(), found["count"].tolist(), found["own"].tolist()) == ([6.0, 1.0], [3], [1.0])


def test_the_attack_is_chosen_on_validation_samples_and_a_backdoor_must_not_be_noticed():
    def row(attack: str, A_T: float, validation: float, success: float, refused: int = 0) -> list[object]:
        return ["afl", "none", 1, 10, attack, A_T, validation, success, refused, None]

    found = [row("none", 90, 80, 2), row("labels", 50, 70, 0), row("labels x 10", 60, 40, 0)]
    found += [row("trigger", 89, 79, 60, 3), row("trigger x 10", 20, 10, 100)]
    line = worst(pd.DataFrame(found, columns=COLUMNS)).splitlines()[-1]
    assert line == "| afl | none | 1 of 10 | 90.0 | 60.0 | labels x 10 | 60 (2) | trigger | 1 / 0 |"


@pytest.mark.slow
def test_one_client_outweighs_all_others_unless_features_are_clipped(tmp_path):
    stream = (
        "data=features",
        f"data.path={digits(tmp_path)}",
        "clients=10",
        "tasks=5",
        "beta=1",
        "data.validation=0.2",
    )
    setting = Setting((*stream, "on_bad_upload=drop"), clients=10, tasks=5, classes=2, attackers=1)
    clip = ["noise=gaussian", "noise.multiplier=0", "noise.clip=3.5"]

    def found(attack: Attack | None, more: list[str]) -> dict:
        return measured("fedncm", attack, setting, more, tmp_path / "out")

    assert found(None, [])["A_T"] > 85 > 30 > found(Attack(scale=100.0), [])["A_T"]
    broken = found(Attack(scale=100.0), clip)
    assert broken["A_T"] > 80
    assert broken["refused"] >= 4
    obeyed = found(Attack(scale=100.0, obeys=True), clip)
    assert obeyed["A_T"] > 80
    assert obeyed["refused"] == 0


def test_robust_sums_are_attacked_by_copies_and_from_near_but_not_by_boosted_sums():
    assert copied(DATA, 3).labels.tolist() == 3 * DATA.labels.tolist()
    names = [attack.name for attack in attacks("stsa", "robust_sum")]
    assert {"labels x 2", "labels, copied", "trigger x 10, copied"} <= set(names)
    assert not any("boosted" in name for name in names)
    assert "labels boosted" in [attack.name for attack in attacks("fedavg", "none")]
