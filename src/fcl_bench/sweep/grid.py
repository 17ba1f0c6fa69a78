"""What a sweep's overrides stand for: the overrides of each of its jobs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser


def combinations(overrides: Iterable[str]) -> list[tuple[str, ...]]:
    """The overrides of each job of `fcl-bench -m overrides...`, in the order of Hydra's own sweeper.

    The last of several overrides of one key counts; the values of the first key change slowest. Raises Hydra's errors
    for an override that cannot be parsed, or whose values are no list (`interval(0,1)`).
    """
    # Hydra's loader knows the choices of `method=glob(*)`.
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    values: dict[str, list[str]] = {}
    for override in parser.parse_overrides(list(overrides)):
        swept = override.is_sweep_override()
        found = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
        key = override.get_key_element()
        values[key] = [f"{key}={value}" for value in found]
    return list(product(*values.values()))
