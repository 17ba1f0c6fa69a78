"""Suggests which key was probably meant by an unknown one, from the words that other tools use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml

from fcl_bench.cli.knobs import WHOLE_RUNS, keys_ending, owners, top_level
from fcl_bench.composition import choices_of, groups
from fcl_bench.config import YAML_LOADER
from fcl_bench.errors import UserError, choices

#: Words of papers and other tools -> our keys for them.
_KEYS_OF = yaml.load(Path(__file__).with_name("words.yaml").read_text(), Loader=YAML_LOADER)
_WORDS = {word: keys.split() for keys, words in _KEYS_OF.items() for word in words}
#: The part of a method with the usual keys of training, which are suggested before other keys of the same name.
_USUAL = "method.training."
#: The largest number of suggestions in one line.
_MOST = 3


def meant(word: str) -> list[str]:
    """The keys and groups that `word` may stand for, the likeliest first; empty if there is none."""
    last = word.rpartition(".")[2].lower().replace("-", "_")
    named = sorted(
        keys_ending(last), key=lambda key: (not key.startswith(_USUAL), not key.startswith("method."), key.count("."))
    )
    return list(dict.fromkeys([*_WORDS.get(last, ()), *([last] if last in groups() else []), *named]))


def unknown_key(
    key: str, value: str, known: Sequence[str], beside: Sequence[str], chosen: Mapping[str, str]
) -> UserError:
    """The error for a key that the composed configuration does not have.

    Args:
        known: every key of the configuration that is composed without it, dotted, and its groups.
    """
    group, _, below = key.partition(".")
    if below and group in groups() and group not in WHOLE_RUNS and (having := owners(group, below)):
        return _of_others(group, key, value, having, chosen[group], beside)
    likely = meant(key)
    if here := [candidate for candidate in likely if candidate in known][:_MOST]:
        return UserError(f"unknown key {key}", f"did you mean {' or '.join(here)}?")
    if likely:
        first = likely[0]
        group, _, below = first.partition(".")
        having = owners(group, below) if group in groups() else []
        others = f"{_names(having)} {'has' if len(having) == 1 else 'have'} it; {group}={chosen.get(group)} does not"
        return UserError(f"unknown key {key}", f"did you mean {first}? {others}")
    return UserError(f"unknown key {key}", choices(beside, key))


def unknown_option(option: str, value: str | None, options: Collection[str]) -> UserError:
    """The error for an unknown option, such as `--seed 3` in place of seed=3.

    Args:
        value: the argument after it, if that is neither an option nor an override.
    """
    name, has_value, own = option.lstrip("-").partition("=")
    written = f"={own if has_value else value}" if has_value or value is not None else "=VALUE"
    same = [key for key in (name, name.replace("-", "_")) if key in (*top_level(), *groups())]
    if likely := same or meant(name):
        return UserError(f"unknown option {option}", f"keys are written without dashes: {likely[0]}{written}")
    near = choices(options, f"--{name}")
    return UserError(f"unknown option {option}", f"keys are written {name}=VALUE; {near}")


def no_override(argument: str, value: str | None, commands: Collection[str], otherwise: str) -> UserError:
    """The error for an argument that is neither an option nor key=value: `seed 3`, `fedran`, `shwo`."""
    what = f"{argument or 'an empty argument'} is not key=value"
    key = argument if argument in (*top_level(), *groups()) else next(iter(meant(argument)), "")
    if key and value is not None:
        return UserError(what, f"did you mean {key}={value}?")
    for group in ("method", "data", "backbone", "experiment", *groups()):
        if argument in choices_of(group):
            return UserError(what, f"did you mean {group}={argument}?")
    near = choices(commands, argument)
    return UserError(what, f"{near.partition('?')[0]}?" if near.startswith("did you mean") else otherwise)


def _of_others(group: str, key: str, value: str, having: list[str], choice: str, beside: Sequence[str]) -> UserError:
    """The error for a key that other choices of its group have, and `choice` lacks."""
    own = ", ".join(name.removeprefix(f"{group}.") for name in beside) or "no keys"
    remedy = f"{group}={choice} has {own}"
    if key == "data.path" and value.endswith(".npz"):
        remedy = f"did you mean data=features data.path={value}? {remedy}"
    return UserError(f"unknown key {key}: it belongs to {_names(having)}", remedy)


def _names(names: list[str]) -> str:
    """Some of the names, and the number of the others."""
    if len(names) <= 6:
        return ", ".join(names)
    return f"{', '.join(names[:4])} and {len(names) - 4} more"
