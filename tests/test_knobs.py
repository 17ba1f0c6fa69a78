"""Knobs say what they may be, and are checked where a configuration becomes objects."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass

import pytest

from fcl_bench.config import knob
from fcl_bench.errors import UserError
from fcl_bench.typed import typed_instance

HUGE = 10**400


@dataclass
class Inner:
    share: float = knob(0.5, least=0, most=1, words="a share, 0 to 1")


@dataclass
class Knobs:
    given: str = knob()
    count: int = knob(1, least=1)
    rate: float = knob(0.1, above=0)
    decay: float = knob(0.0, least=0)
    fraction: float = knob(1.0, above=0, most=1)
    momentum: float = knob(0.0, least=0, below=1)
    kind: str = knob("plain", choices=("plain", "other"))
    rounds: list[int] = knob(list, least=1)
    inner: Inner = knob(Inner)
    second: Inner | None = None
    most: int | None = knob(None, least=1)
    free: int = 0
    shares: list[float] = knob(list, least=0)
    size: float | str = knob("auto", choices=("auto",), above=0)
    out: str = knob("a", filled=True, words="a folder")


def test_defaults_are_those_that_are_declared():
    found = typed_instance(Knobs, {"given": "a"}, "group")
    assert found == Knobs("a", 1, 0.1, 0.0, 1.0, 0.0, "plain", [], Inner(0.5), None, None)
    assert typed_instance(Knobs, {"given": "a", "most": None, "rounds": [1, 2]}, "group").rounds == [1, 2]


@pytest.mark.parametrize("off", [None, False])
def test_a_part_with_keys_of_its_own_can_be_switched_off(off):
    assert typed_instance(Knobs, {"given": "a", "second": off}, "group").second is None


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"count": 0}, "group.count=0 is out of range (an integer of at least 1)"),
        ({"most": 0}, "group.most=0 is out of range (an integer of at least 1)"),
        ({"rate": 0}, "group.rate=0.0 is out of range (a finite number above 0)"),
        ({"count": 2**63}, "group.count=9223372036854775808 is out of range (at most 9223372036854775807)"),
        ({"free": -(2**63)}, "group.free=-9223372036854775808 is out of range (at most 9223372036854775807)"),
        ({"rate": 10**40}, "group.rate=1e+40 is out of range (at most 1e+38)"),
        ({"rate": float("inf")}, "group.rate=inf is out of range (a finite number above 0)"),
        ({"decay": -1}, "group.decay=-1.0 is out of range (a finite number, 0 or more)"),
        ({"decay": float("nan")}, "group.decay=nan is out of range (a finite number, 0 or more)"),
        ({"fraction": 0}, "group.fraction=0.0 is out of range (above 0, at most 1)"),
        ({"momentum": 1}, "group.momentum=1.0 is out of range (0 or more, below 1)"),
        ({"kind": "plian"}, "group.kind=plian is not known (did you mean plain? choices: other, plain)"),
        ({"out": " "}, "group.out is empty (a folder)"),
        ({"rounds": [3, 0]}, "group.rounds=0 is out of range (an integer of at least 1)"),
        ({"inner": {"share": 2}}, "group.inner.share=2.0 is out of range (a share, 0 to 1)"),
        ({"second": {"share": -1}}, "group.second.share=-1.0 is out of range (a share, 0 to 1)"),
        ({"inner": None}, "group.inner=None has the wrong type (keys of its own: share)"),
        ({"count": None}, "group.count=null has the wrong type (an integer)"),
        ({"given": "???"}, "group.given has no value (group.given=...)"),
    ],
)
def test_an_impossible_value_is_told_with_its_key_and_what_would_work(knobs, told):
    with pytest.raises(UserError) as error:
        typed_instance(Knobs, {"given": "a", **knobs}, "group")
    assert str(error.value) == told


@dataclass
class Part:
    size: int = knob(3, of="kind=other")
    trimmed: float = 0.5


@dataclass
class Whole:
    kind: str = knob("plain", choices=("plain", "other", "third"))
    late: list[str] = knob(list)
    late_by: int = knob(1, of="late")
    batch: int = knob(64, of="kind=other,third|late")
    part: Part = knob(lambda: Part(size=5), of="kind=other")


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"late_by": 2}, "g.late_by=2 has no effect (g.late beside it, or its default: 1)"),
        ({"batch": 2}, "g.batch=2 has no effect (g.kind=other or third or g.late beside it, or its default: 64)"),
        ({"part": {"size": 3}}, "g.part.size=3 has no effect (g.kind=other beside it, or its default: 5)"),
        ({"part": {"trimmed": 0.1}}, "g.part.trimmed=0.1 has no effect (g.kind=other beside it, or its default: 0.5)"),
        ({"late_by": 2, "late": ["1@0"]}, None),
        ({"batch": 2, "kind": "third"}, None),
        ({"part": {"size": 4, "trimmed": 0.1}, "kind": "other"}, None),
        ({"late_by": 1, "batch": 64, "part": {"size": 5, "trimmed": 0.5}}, None),
    ],
)
def test_a_knob_that_nothing_reads_beside_the_others_may_only_have_its_default(knobs, told):
    if told is None:
        typed_instance(Whole, knobs, "g")
        return
    with pytest.raises(UserError) as error:
        typed_instance(Whole, knobs, "g")
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("knobs", "key"),
    [
        ({"rate": HUGE}, "group.rate"),
        ({"rate": -HUGE}, "group.rate"),
        ({"size": HUGE}, "group.size"),
        ({"shares": [0.5, HUGE]}, "group.shares"),
        ({"inner": {"share": HUGE}}, "group.inner.share"),
        ({"second": {"share": HUGE}}, "group.second.share"),
        ({"count": HUGE}, "group.count"),
        ({"free": HUGE}, "group.free"),
        ({"rounds": [1, HUGE]}, "group.rounds"),
    ],
)
def test_an_integer_too_large_for_a_float_is_told_with_its_key(knobs, key):
    """Python and OmegaConf raise OverflowError for it."""
    with pytest.raises(UserError) as error:
        typed_instance(Knobs, {"given": "a", **knobs}, "group")
    assert error.value.what in (f"{key}={HUGE} is out of range", f"{key}={-HUGE} is out of range")
    assert error.value.remedy in ("at most 1e+38", "at most 9223372036854775807")


def test_an_overflow_of_another_kind_stays_what_it_is():
    """It is a bug of ours, or of the class."""

    @dataclass
    class Broken:
        count: int = 1

        def __post_init__(self) -> None:
            raise OverflowError("of its own")

    with pytest.raises(OverflowError, match="of its own"):
        typed_instance(Broken, {}, "")


def test_without_a_group_the_key_stands_alone():
    with pytest.raises(UserError, match=r"^count=0 is out of range"):
        typed_instance(Knobs, {"given": "a", "count": 0}, "")


@pytest.mark.parametrize(
    ("declared", "value", "wanted"),
    [
        (float, [1], "a number"),
        (int, "x", "an integer"),
        (bool, "x", "true or false"),
        (int | None, "x", "an integer or null"),
    ],
)
def test_types_that_are_no_texts_are_told_in_words(declared, value, wanted):
    schema = make_dataclass("Mine", [("ridge", declared)])
    with pytest.raises(UserError, match=rf"method\.ridge=.* has the wrong type \({wanted}\)"):
        typed_instance(schema, {"ridge": value}, "method")
