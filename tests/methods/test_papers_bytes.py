"""What FedProTIP's tables count, recomputed from the network itself (docs/errata.md, 8)."""

from __future__ import annotations

import pytest
import timm

from fcl_bench.backbones.trainable import Trainable
from fcl_bench.training.layer_inputs import projectable
from fcl_bench.training.network import Network


@pytest.fixture(scope="module")
def widths() -> list[int]:
    """d_l of every layer of ResNet-18, the head's input included."""
    body = timm.create_model("resnet18", num_classes=0)
    network = Network(Trainable("resnet18", lambda: body, 512, 32, (0.5,) * 3, (0.5,) * 3, (), {}))
    return [*(layer.weight.flatten(1).shape[1] for layer in projectable(network).values()), 512]


def test_table_19_counts_unfolded_widths(widths):
    """16.1 and 8.1 MB for sketches of 128 and 64 columns."""
    assert sum(widths) == 31_635
    assert 4 * 128 * sum(widths) / 1e6 == pytest.approx(16.1, rel=0.01)
    assert 4 * 64 * sum(widths) / 1e6 == pytest.approx(8.1, rel=0.01)
    assert 4 * sum(d * d for d in widths) / 1e6 == pytest.approx(366.9, rel=0.01)


def test_table_9_does_not_count_what_table_20_says_of_fot(widths):
    assert 4 * 5 * sum(d * d for d in widths) / 1e6 == pytest.approx(1845, rel=1e-3)
    assert 1845 / 48 > 38


def test_table_9s_model_grows_by_more_than_ten_classes():
    assert pytest.approx(0.0205, abs=1e-4) == 4 * 10 * 513 / 1e6
    assert pytest.approx(0.078, abs=1e-3) == (47.389 - 46.686) / 9
