"""What a server expects of an upload, and the first thing that is wrong with one."""

from __future__ import annotations

import math

import pytest
import torch

from fcl_bench.engine.validation import first_objection
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.protocol.fields import counts, images, like, numbers, real, weights

#: A sketch of r directions, class sums, counts of some classes, and what may be left out.
EXPECTED = {
    "V": real(4, "r"),
    "sigma": real("r", least=0),
    "S": real(4, 3),
    "n": counts(3),
    "classes": numbers("held", below=5),
    "note": real(2, optional=True),
}


def upload(**changed) -> dict[str, torch.Tensor]:
    """As expected, but for what is changed; None leaves a field out."""
    fields = {
        "V": torch.randn(4, 2),
        "sigma": torch.tensor([2.0, 0.0]),
        "S": torch.randn(4, 3, dtype=torch.float64),
        "n": torch.tensor([3, 0, 1], dtype=torch.int32),
        "classes": torch.tensor([0, 4]),
        **changed,
    }
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"note": torch.zeros(2)},
        {"V": torch.zeros(4, 0), "sigma": torch.zeros(0)},
        {"classes": torch.zeros(0, dtype=torch.int16)},
        {"n": torch.zeros(3, dtype=torch.uint8)},
        {"S": torch.zeros(4, 3, dtype=torch.bfloat16)},
    ],
)
def test_nothing_is_said_of_what_is_as_expected(changed):
    assert first_objection(upload(**changed), EXPECTED) is None


FIELDS = "the fields V, sigma, S, n, classes, note"
WRONG = {
    "missing": ({"S": None}, ("S", "is missing", FIELDS)),
    "unknown": ({"extra": torch.zeros(1)}, ("extra", "is no field of this upload", FIELDS)),
    "another length": ({"S": torch.zeros(4, 2)}, ("S", "has the shape (4, 2)", "(4, 3)")),
    "fewer sides": ({"S": torch.zeros(12)}, ("S", "has the shape (12,)", "(4, 3)")),
    "more sides": ({"n": torch.zeros(3, 1, dtype=torch.int64)}, ("n", "has the shape (3, 1)", "(3)")),
    "no side": ({"n": torch.tensor(3)}, ("n", "has the shape ()", "(3)")),
    "one name, two lengths": ({"sigma": torch.zeros(3)}, ("sigma", "has the shape (3,)", "(r=2)")),
    "a length beside a name": ({"V": torch.zeros(5, 2)}, ("V", "has the shape (5, 2)", "(4, r)")),
    "whole for real": (
        {"S": torch.zeros(4, 3, dtype=torch.int64)},
        ("S", "has the type int64", "a floating-point type"),
    ),
    "complex for real": (
        {"S": torch.zeros(4, 3, dtype=torch.complex64)},
        ("S", "has the type complex64", "a floating-point type"),
    ),
    "real for whole": ({"n": torch.zeros(3)}, ("n", "has the type float32", "an integer type")),
    "yes or no for whole": ({"n": torch.zeros(3).bool()}, ("n", "has the type bool", "an integer type")),
    "not a number": ({"S": torch.full((4, 3), math.nan)}, ("S", "is not finite", "finite numbers")),
    "infinite": ({"sigma": torch.tensor([math.inf, 1.0])}, ("sigma", "is not finite", "finite numbers")),
    "opposite infinities": (
        {"sigma": torch.tensor([math.inf, -math.inf])},
        ("sigma", "is not finite", "finite numbers"),
    ),
    "negative": ({"sigma": torch.tensor([1.0, -0.5])}, ("sigma", "holds -0.5", "no value below 0")),
    "negative counts": ({"n": torch.tensor([1, -2, 0])}, ("n", "holds -2", "no value below 0")),
    "a number too large": ({"classes": torch.tensor([0, 5])}, ("classes", "holds 5", "values below 5")),
    "a number too small": ({"classes": torch.tensor([-1])}, ("classes", "holds -1", "no value below 0")),
    "optional and wrong": ({"note": torch.zeros(3)}, ("note", "has the shape (3,)", "(2)")),
    "optional and infinite": ({"note": torch.tensor([1.0, math.inf])}, ("note", "is not finite", "finite numbers")),
}


@pytest.mark.parametrize(("changed", "objection"), WRONG.values(), ids=WRONG.keys())
def test_the_field_is_named_with_what_it_is_and_what_was_expected(changed, objection):
    assert first_objection(upload(**changed), EXPECTED) == objection


def test_one_name_is_one_length_whichever_field_comes_first():
    """Of two fields that differ, the later one of the upload is named, with the length of the earlier."""
    fields = upload(sigma=torch.zeros(3))
    turned = dict(reversed(fields.items()))
    assert first_objection(turned, EXPECTED) == ("V", "has the shape (4, 2)", "(4, r=3)")


def test_one_name_twice_in_one_shape_is_a_square():
    assert first_objection({"G": torch.zeros(3, 3)}, {"G": real("d", "d")}) is None
    assert first_objection({"G": torch.zeros(3, 2)}, {"G": real("d", "d")}) == (
        "G",
        "has the shape (3, 2)",
        "(d=3, d=3)",
    )


def test_lengths_hold_for_one_upload_only():
    assert first_objection(upload(), EXPECTED) is None
    assert first_objection(upload(V=torch.zeros(4, 3), sigma=torch.zeros(3)), EXPECTED) is None


def test_a_missing_field_comes_before_any_other_fault():
    found = first_objection(upload(V=torch.full((9, 9), math.nan), n=None), EXPECTED)
    assert found == ("n", "is missing", FIELDS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int8])
def test_images_are_bytes(dtype):
    expected = {"images": images("n", 3, "h", "w")}
    pixels = torch.zeros(2, 3, 8, 8)
    assert first_objection({"images": pixels.to(torch.uint8)}, expected) is None
    shown = str(dtype).removeprefix("torch.")
    assert first_objection({"images": pixels.to(dtype)}, expected) == ("images", f"has the type {shown}", "uint8")


def test_an_upload_without_fields_fits_an_expectation_without_fields_only():
    assert first_objection({}, {}) is None
    assert first_objection({"a": torch.zeros(1)}, {}) == ("a", "is no field of this upload", "the fields ")
    assert first_objection({}, {"a": real(1)}) == ("a", "is missing", "the fields a")


def test_like_takes_names_and_shapes_and_no_values():
    model = {"weight": torch.full((2, 3), math.nan), "bias": torch.zeros(2), "scalar": torch.tensor(1.0)}
    expected = like(model, weights())
    assert first_objection({name: torch.ones_like(value) for name, value in model.items()}, expected) is None
    assert first_objection(model, expected) == ("weight", "is not finite", "finite numbers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_finite_terms_whose_sum_overflows_are_finite(dtype):
    largest = torch.finfo(dtype).max
    values = torch.full((5,), largest, dtype=dtype)
    assert not torch.isfinite(values.sum())
    assert all_finite(values)
    for wrong in (math.nan, math.inf, -math.inf):
        values[2] = wrong
        assert not all_finite(values)
