"""Models in one buffer at the border of the server."""

from __future__ import annotations

import math

import pytest
import torch

from fcl_bench.engine.validation import first_objection
from fcl_bench.linalg.tensors import Flat
from fcl_bench.protocol.fields import like, weights


@pytest.mark.parametrize("field", ["a.weight", "b.running_mean", "b.running_var"])
@pytest.mark.parametrize("value", [0.5, -0.5, 0.0, 1e19, -1e19, 1e31, torch.nan, torch.inf, -torch.inf])
def test_a_model_in_one_buffer_is_refused_for_what_a_model_in_tensors_is(field, value):
    model = {"a.weight": torch.ones(30, 40), "b.running_mean": -torch.ones(4), "b.running_var": torch.ones(4)}
    model[field].view(-1)[-2] = value
    expected = like(model, weights())
    for largest in (math.inf, 1e18):
        found = first_objection(Flat.of(model), expected, largest=largest)
        assert found == first_objection(model, expected, largest=largest)
        fits = abs(value) < min(largest, 1e30) and not (value < 0 and field == "b.running_var")
        assert (found is None) == fits
        assert found is None or found[0] == field
