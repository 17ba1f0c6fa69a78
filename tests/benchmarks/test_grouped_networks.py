"""The rounds of the benchmark learn the same side by side, and its line says what was measured."""

from __future__ import annotations

import grouped_networks
import pytest
from grouped_networks import Setting

from fcl_bench.training.knobs import Training


def setting_of(**own) -> Setting:
    return Setting(width=2, side=8, clients=4, samples=6, training=Training(rounds=1, epochs=1, batch_size=6), **own)


@pytest.mark.parametrize("unequal", [False, True])
def test_all_sides_learn_the_same_on_the_same_sizes(unequal):
    setting = setting_of(unequal=unequal)
    sizes = {len(client_data) for client_data in setting.shards}
    assert (sizes != {6}) is unequal
    found, apart = grouped_networks.measured(setting, [3], repeats=2)
    assert {size: len(seconds) for size, seconds in found.items()} == {1: 2, 3: 2}
    assert apart < 1e-4
    start = setting.context.network.build().state_dict()
    model, _ = setting.rounds()
    assert max((model[f"body.{name}"] - value).abs().max() for name, value in start.items() if "weight" in name) > 1e-3


def test_the_line_has_ratios_of_each_repetition():
    told = grouped_networks.line(setting_of(), {1: [2.0, 4.0, 6.0], 3: [1.0, 4.0, 2.0]}, 2e-7)
    assert told.endswith("alone 1000.0 ms; alone / 3 together 2.00; models apart 2e-07")
