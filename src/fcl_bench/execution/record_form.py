"""Whether a run record that was read has the types that `run_json` declares."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from fcl_bench.execution.run_json import RunRecord


def misfit(record: Mapping[str, Any]) -> str:
    """What is wrong with a record, in words; "" if nothing is. Keys that are not declared may hold anything."""
    return _misfit(record, RunRecord, "")


def _misfit(value: Any, wanted: Any, where: str) -> str:
    origin, parts = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return ""
    if origin in (Union, types.UnionType):
        found = [_misfit(value, part, where) for part in parts]
        return "" if "" in found else found[0]
    if is_typeddict(wanted):
        if not isinstance(value, dict):
            return f"{where or 'it'} is no mapping"
        hints = get_type_hints(wanted)
        lacking = [key for key in hints if key in wanted.__required_keys__ and key not in value]
        if lacking:
            return f"{where or 'it'} lacks {lacking[0]}"
        inner = ((value[key], hint, f"{where}.{key}" if where else key) for key, hint in hints.items() if key in value)
    elif origin is list:
        if not isinstance(value, list):
            return f"{where} is no list"
        inner = ((one, parts[0], f"{where}[{place}]") for place, one in enumerate(value))
    elif origin is dict:
        if not isinstance(value, dict):
            return f"{where} is no mapping"
        inner = ((one, parts[1], f"{where}.{key}") for key, one in value.items())
    else:
        return _plain(value, wanted, where)
    return next((wrong for one in inner if (wrong := _misfit(*one))), "")


def _plain(value: Any, wanted: Any, where: str) -> str:
    # A whole number is a real one too; true and false are neither.
    fits = type(value) in ((int, float) if wanted is float else (wanted,))
    return "" if fits else f"{where} is no {wanted.__name__}"
