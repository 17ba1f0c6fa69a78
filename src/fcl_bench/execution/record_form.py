"""Whether a run record that was read has the types that `run_json` declares."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from fcl_bench.execution.run_json import RunRecord

#: Keys of each part that every version of this schema has written; others may be missing from an older run's record.
_ALWAYS = {
    "RunRecord": (
        *("schema", "run_id", "method", "data", "backbone", "split", "partition", "seed", "beta", "clients", "tasks"),
        *("data_fingerprint", "metrics", "communication", "labels", "runtime", "environment", "files"),
    ),
    "Metrics": (
        *("accuracy", "A_avg", "A_T", "A_avg_tasks", "A_T_tasks", "forgetting", "forgetting_fedprotip", "retention"),
        *("stability", "plasticity"),
    ),
    "Routing": ("accuracy", "by_task", "unrouted"),
    "Adaptation": ("up_max_bytes", "down_max_bytes", "up_total_bytes", "rounds", "accuracy", "seconds", "cache_hit"),
    "Communication": (
        *("up_max_bytes", "up_total_max_bytes", "down_max_bytes", "up_total_bytes", "down_total_bytes", "by_stage"),
        "wire",
    ),
    "Raw": ("kind", "sample_bytes", "busiest_bytes", "total_bytes", "uploads", "larger"),
    "Labels": ("samples", "labelled", "accepted", "right", "rate"),
    "Dropped": ("uploads", "clients"),
    "Drift": ("last", "mean"),
    "BestRounds": ("every", "best", "best_round"),
    "Absences": ("silent", "gone", "late"),
    "BatchedTurns": ("turns_batched", "turns_single"),
    "ClientAccuracy": ("clients", "mean", "std", "least", "most"),
    "Guarantee": ("epsilon", "delta", "unit", "clip", "multiplier", "releases", "of_sums", "accountant"),
    "Transport": ("name", "processes"),
    "TreeLevel": ("level", "nodes", "messages", "up_bytes", "down_bytes", "seconds"),
    "Runtime": (
        *("seconds_per_task", "client_seconds", "server_seconds", "feature_seconds", "feature_cost_seconds"),
        *("feature_cache_hit", "total_seconds"),
    ),
}


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
        lacking = [key for key in _ALWAYS.get(wanted.__name__, ()) if key not in value]
        if lacking:
            return f"{where or 'it'} lacks {lacking[0]}"
        hints = get_type_hints(wanted)
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
    return next((told for one in inner if (told := _misfit(*one))), "")


def _plain(value: Any, wanted: Any, where: str) -> str:
    # A whole number is a real one too; true and false are neither.
    fits = type(value) in ((int, float) if wanted is float else (wanted,))
    return "" if fits else f"{where} is no {wanted.__name__}"
