"""The grouped networks of the benchmark are the clients' own, and its line says what was measured."""

from __future__ import annotations

import grouped_networks
import pytest
import torch


@pytest.mark.parametrize("together", [2, 4])
def test_all_sides_end_with_the_same_class_weights(together):
    setting = grouped_networks.Setting(width=2, side=8, clients=4, samples=6, batch=3, epochs=2)
    found = {name: side() for name, side in grouped_networks.sides_of(setting, together).items()}
    assert set(found) == {"single", "grouped", "grouped, planar"}
    for weights in found.values():
        torch.testing.assert_close(weights, found["single"], rtol=1e-4, atol=1e-5)
        assert (weights - setting.head).abs().amax(dim=(1, 2)).min() > 1e-3
    assert (found["single"][0] - found["single"][1]).abs().max() > 1e-3


def test_the_line_has_ratios_of_each_repetition():
    setting = grouped_networks.Setting(width=2, side=8, clients=4, samples=6, batch=3, epochs=2)
    found = {"single": [2.0, 4.0, 6.0], "grouped": [1.0, 4.0, 2.0], "grouped, planar": [4.0, 4.0, 6.0]}
    assert grouped_networks.line(setting, found).endswith(
        "single 1000.0 ms; single / grouped 2.00, grouped, planar 1.00"
    )
