"""A composed group as an instance of its dataclass; errors name the key as the user typed it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from fcl_bench.errors import UserError, choices, require_choice

#: Numbers beyond these bounds are of no use, and libraries raise their own errors for them.
_LARGEST_INTEGER, _LARGEST_NUMBER = 2**63 - 1, 1e38

#: Values with which a knob that is read only "with" another is not read; and that profiles set beside anything.
_NOTHING = ("none", "false", "0", "0.0", "[]")
#: The limits of a number by keyword of `knob`: the condition, and its wording.
_BOUNDS = {
    "least": (operator.ge, "{:g} or more"),
    "above": (operator.gt, "above {:g}"),
    "most": (operator.le, "at most {:g}"),
    "below": (operator.lt, "below {:g}"),
}


def typed_instance(schema: type, knobs: dict[str, Any], group: str) -> Any:
    """An instance of the dataclass `schema`; errors name the key as the user typed it."""
    return copy.deepcopy(_typed_once(schema, pickle.dumps(knobs), group))


@functools.lru_cache(maxsize=1024)  # neighbours in a sweep differ in one or two of a dozen groups
def _typed_once(schema: type, pickled: bytes, group: str) -> Any:
    prefix, knobs = f"{group}." if group else "", pickle.loads(pickled)
    try:
        return _instance(schema, knobs, prefix)
    except OverflowError as error:
        for key, value in _leaves(knobs, group):
            if isinstance(value, int) and abs(value) > sys.float_info.max:  # too large for a float
                raise UserError(f"{key}={value} is out of range", f"at most {_LARGEST_NUMBER}") from error
        raise


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every value in nested mappings and lists with its dotted key; entries of a list have the list's."""
    if isinstance(node, Mapping):
        for name, entry in node.items():
            yield from _leaves(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for entry in node:
            yield from _leaves(entry, key)
    else:
        yield key, node


def _instance(schema: type, knobs: dict[str, Any], prefix: str) -> Any:
    known = types_of(schema)
    for name, declared in known.items():
        given = knobs.get(name, {})
        if {float, str} <= set(get_args(declared)):
            knobs = {**knobs, name: _number_or_text(given)} if name in knobs else knobs
            continue
        if isinstance(given, dict) or not nested(declared):
            continue
        if NoneType in get_args(declared) and (given is None or given is False):
            knobs = {**knobs, name: None}  # false is a natural way to switch off a part that has keys of its own
        else:
            raise UserError(f"{prefix}{name}={given} has the wrong type", _wanted(schema, name))
    try:
        node = OmegaConf.merge(_structured(schema), knobs)
        _check_knobs(node, prefix, None)
        return OmegaConf.to_object(node)
    except ConfigKeyError as error:
        key = str(error.full_key or error.key)
        remedy = choices(known, key) if "." not in key else "a key listed in the YAML"
        raise UserError(f"unknown key {prefix}{key}", remedy) from error
    except MissingMandatoryValue as error:
        raise UserError(f"{prefix}{error.full_key} has no value", f"{prefix}{error.full_key}=...") from error
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from error
        key = str(error.full_key or error.key or "")
        value = OmegaConf.select(OmegaConf.create(knobs), key)
        typed = "null" if value is None else str(value)
        raise UserError(f"{prefix}{key}={typed} has the wrong type", _wanted(schema, key)) from error


@functools.cache
def _structured(schema: type) -> Any:
    """The fields of a dataclass with their defaults; to be copied, as `merge` does."""
    return OmegaConf.structured(schema)


def _number_or_text(given: Any) -> Any:
    """A value of a field that takes numbers and texts: 1 and "1e-3" are numbers."""
    if isinstance(given, bool) or not isinstance(given, int | str):
        return given
    try:
        return float(given)
    except ValueError:
        return given


def _check_knobs(node: Any, prefix: str, usual: Any, of: str = "") -> None:
    """Raise a `UserError` for what a `knob` rules out: `usual` has the defaults, `of` is what all is read with."""
    schema: Any = OmegaConf.get_type(node)
    for field in dataclasses.fields(schema):
        value, key = node[field.name], f"{prefix}{field.name}"
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default, own = getattr(usual, field.name, made), field.metadata.get("of") or of
        if dataclasses.is_dataclass(OmegaConf.get_type(value)):
            _check_knobs(value, f"{key}.", default, own)
            continue
        for name, entry in _leaves(value, key):
            _require_usual(name, entry)
            if "bounds" in field.metadata and entry is not None:
                _check_value(name, entry, field.metadata)
        idle = default in (value, dataclasses.MISSING) or str(value).lower() in _NOTHING
        if own and not idle and (lacking := _lacking(node, prefix, own)):
            raise UserError(f"{key}={value} has no effect", f"{lacking} beside it, or its default: {default}")


def _lacking(node: Any, prefix: str, of: str) -> str:
    """What a knob that is read only with `of` lacks, as it would be typed; "": nothing. See `knob`."""
    lacking = []
    for one in of.split("|"):
        (name, _, values), holder, at = one.partition("="), node, prefix
        while holder is not None and name not in holder:
            holder, at = holder._get_parent(), f"{at.rstrip('.').rpartition('.')[0]}."
        found = "none" if holder is None else str(holder[name]).lower()
        if holder is None or (found in values.split(",") if values else found not in _NOTHING):
            return ""
        lacking.append(f"{at}{name}" + f"={values.replace(',', ' or ')}" * bool(values))
    return " or ".join(lacking)


def _require_usual(key: str, value: Any) -> None:
    """Raise a `UserError` for an integer beyond 64 bits, or a text with an escape sequence, a line break and the like.

    Libraries cannot convert such integers, and such texts would end up in names and on terminals.
    """
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise UserError(f"{key}={value} is out of range", f"at most {_LARGEST_INTEGER}")
    if not str(value).isprintable():
        raise UserError(f"{key}={value} holds what cannot be printed", "printable characters")


@functools.cache
def types_of(schema: type) -> dict[str, Any]:
    """The declared type of each field of a dataclass."""
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def nested(declared: Any) -> Any:
    """The dataclass of a field that is declared as a dataclass, or as a dataclass or null; None for any other field."""
    return next(filter(dataclasses.is_dataclass, (declared, *get_args(declared))), None)


def _wanted(schema: type, key: str) -> str:
    """The type of a key in words ("an integer", "a number or null")."""
    words = {"int": "an integer", "float": "a number", "bool": "true or false", "None": "null"}
    words |= {"str": "a text", "list[str]": "a list of texts"}
    for part in key.split("."):
        name, _, _ = part.partition("[")
        declared = next((_as_written(field.type) for field in dataclasses.fields(schema) if field.name == name), "")
        if part_schema := nested(types_of(schema).get(name)):
            schema = part_schema
            declared = "keys of its own: " + ", ".join(types_of(part_schema))
    return " or ".join(words.get(kind.strip(), kind.strip()) for kind in declared.split("|")) or "see the YAML"


def _as_written(declared: Any) -> str:
    """A field's type as it stands in the code, also where its module does not postpone annotations."""
    return declared.__name__ if type(declared) is type else str(declared)


def _check_value(key: str, value: Any, limits: Mapping[str, Any]) -> None:
    """Raise a `UserError` for a value outside of the limits in a knob's metadata."""
    if limits["choices"] and isinstance(value, str):
        numbers = [limits["words"] or _in_words(limits["bounds"], False)] if limits["bounds"] else []
        require_choice(key, value, limits["choices"], numbers)
    elif limits["filled"] and not value.strip():
        raise UserError(f"{key} is empty", limits["words"])
    elif isinstance(value, int | float):
        bounds, whole = limits["bounds"], isinstance(value, int)
        finite = math.isfinite(value)
        if finite and not whole and abs(value) > _LARGEST_NUMBER:
            raise UserError(f"{key}={value} is out of range", f"at most {_LARGEST_NUMBER}")
        if not finite or not all(_BOUNDS[name][0](value, limit) for name, limit in bounds.items()):
            raise UserError(f"{key}={value} is out of range", limits["words"] or _in_words(bounds, whole))


def _in_words(bounds: dict[str, float], whole: bool) -> str:
    words = ", ".join(_BOUNDS[name][1].format(limit) for name, limit in bounds.items())
    if len(bounds) > 1:
        return words
    if "least" not in bounds:
        return f"a finite number {words}".strip()
    return f"an integer of at least {bounds['least']:g}" if whole else f"a finite number, {words}"
