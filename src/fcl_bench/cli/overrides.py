"""Between what a user types and Hydra: arguments in the form that Hydra wants, its complaints in ours."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

from fcl_bench.cli.knobs import choices_of, groups
from fcl_bench.cli.suggestions import no_override, unknown_key, unknown_option
from fcl_bench.errors import UserError, choices, first_line, installing

#: What may stand first in place of keys, and the module whose `work` is given the arguments after it.
COMMANDS = {
    "show": "fcl_bench.cli.show",
    "tune": "fcl_bench.cli.tune",
    "predict": "fcl_bench.cli.predict",
}
SEE_HELP = "fcl-bench --help lists keys and choices"
#: Keys whose values are paths.
_PATHS = ("out", "data.path", "backbone.checkpoint", "cache.dir")
#: Groups of Hydra's whose choices write a log file, most of them.
_LOGGING = ("hydra/job_logging", "hydra/hydra_logging")
#: Hydra's options that take part here, and whether a value follows.
_OPTIONS = {
    **dict.fromkeys(("-m", "--multirun", "--hydra-help", "--resolve", "--run", "-r"), False),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--info", "-i"), True),
    **dict.fromkeys(("--config-name", "-cn", "--config-dir", "-cd"), True),
    **dict.fromkeys(("--shell-completion", "-sc"), True),
}


def ordered(arguments: list[str]) -> list[str]:
    """The options, then the overrides, as Hydra's parser wants them; a UserError for whatever is neither."""
    options: list[str] = []
    overrides: list[str] = []
    skipped = -1
    for number, argument in enumerate(arguments):
        if number == skipped:
            continue
        following = next(iter(arguments[number + 1 :]), None)
        value = following if following is not None and not re.search(r"^-\D|=", following) else None
        if argument.startswith("-"):
            name, has_value, _ = argument.partition("=")
            if name == "--experimental-rerun":
                raise UserError(f"{name} would unpickle a file, which can run any code", "the keys of that run again")
            if name not in _OPTIONS:
                raise unknown_option(argument, value, _OPTIONS)
            options.append(argument)
            if _OPTIONS[name] and not has_value:
                if following is None:
                    raise UserError(f"{argument} needs a value", "such as --cfg job")
                options.append(following)
                skipped = number + 1
        elif "=" in argument or argument.startswith("~"):
            overrides.append(argument)
        else:
            raise no_override(argument, value, COMMANDS, f"such as method=fedran; {SEE_HELP}")
    for override in overrides:
        _require_plain_choice(override)
    sweep = bool({"-m", "--multirun"} & set(options))
    overrides = [_quoted_path(override, sweep) for override in overrides]
    return options + (_swept(overrides) if sweep else overrides)


def _require_plain_choice(override: str) -> None:
    """Raise a `UserError` for a group whose choice is a mapping or a list, and for logging into the working folder."""
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    if key == "hydra.verbose" and re.fullmatch(r"-?\d+(\.\d+)?|null|", value):
        raise UserError(f"{override} has the wrong type", "true, false, or the name of a logger such as hydra")
    if key in _LOGGING and value not in ("none", "disabled"):
        raise UserError(f"{key}={value} would write into the working folder", "run.log in the run's folder has it all")
    # Whatever Hydra's parser does not take for a text: it would say so in words of its own.
    if key in groups() and re.match(r"[{[]|(null|true|false|[-+]?(\d+(\.\d*)?(e[-+]?\d+)?|inf|nan))$", value, re.I):
        raise UserError(f"{override} is no choice of the group {key}", choices(choices_of(key)))


def _swept(overrides: list[str]) -> list[str]:
    """In a sweep over a group (method=stsa,afl), a key of its choices (method.gamma=1) as a sweep over one value.

    Hydra first composes a sweep without what is swept, so with the group's default choice, and would look for the key
    there.
    """
    groups = {key for key, _, value in (override.partition("=") for override in overrides) if "," in value}
    made = []
    for override in overrides:
        key, _, value = override.partition("=")
        one_value = "," not in value or value[:1] in ("[", "{", "'", '"')
        if key.partition(".")[0] in groups and "." in key and one_value and not re.match(r"\w+\(", value):
            override = f"{key}=choice({value})"
        made.append(override)
    return made


def _quoted_path(override: str, sweep: bool) -> str:
    """A path with its `~` expanded, in the quotes that Hydra's grammar wants around spaces, brackets and the like.

    In a sweep a comma separates values and is left alone; so is what is already quoted.
    """
    key, _, value = override.partition("=")
    if key.lstrip("+") not in _PATHS or value[:1] in ("'", '"') or (sweep and "," in value):
        return override
    value = os.path.expanduser(value)
    if re.fullmatch(r"[\w./:+%@?|-]*", value, flags=re.ASCII) or "${" in value:
        return f"{key}={value}"
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def composition_error(error: Exception, typed: list[str]) -> UserError:
    """What Hydra reports of a wrong group, choice, key or syntax, in one line with what would work.

    Args:
        error: what composing the configuration raised.
        typed: the arguments that were to be composed.
    """
    from hydra.core.override_parser.overrides_parser import OverrideParseException
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    text = " ".join(str(error).split())
    if re.search(r"Could not (find|load) 'hydra/launcher/(joblib|submitit_\w+)'", text):
        launcher = next(argument for argument in typed if argument.startswith("hydra/launcher="))
        return UserError(f"{launcher}: its launcher is not installed", installing("sweep"))
    if found := re.search(r"Could not (?:find|load) '([^']+)/([^'/]*)'", text):
        return _unknown_choice(*found.groups())
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        # Hydra looked for the choice's file: its name is too long for one.
        file = Path(str(error.filename))
        return _unknown_choice(file.parent.name, file.stem)
    if found := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(found[1], typed)
    if found := re.search(r"Ambiguous value for argument '([^']*)'", text):
        return UserError(f"{found[1]} names several values", "-m runs each of them; a list is written key=[a,b]")
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override} cannot be parsed", "key=value; a value with special characters as key='\"value\"'"
        )
    if isinstance(error, HydraException | OmegaConfBaseException):
        return UserError(first_line(error), SEE_HELP)
    return UserError(f"the configuration cannot be composed: {first_line(error)}", SEE_HELP)


def _unknown_choice(group: str, choice: str) -> UserError:
    options = choices_of(group)
    return UserError(f"{group}={choice} is not known", choices(options, choice) if options else SEE_HELP)


def _unknown_key(key: str, typed: list[str]) -> UserError:
    """Names the choice that lacks `key`, those that have it, and the keys that there are."""
    chosen = [text for text in typed if text.partition("=")[0] in groups() and "," not in text]
    top = _composed(chosen)
    known, beside = _dotted(top), _keys_beside(key, top)
    if key in known:
        return UserError(f"{key} takes no new keys in this form", f"+{key}.KEY=VALUE")
    return unknown_key(key, [*known, *groups()], beside, typed)


def _composed(chosen: list[str]) -> Any:
    """The configuration of these choices, as mappings and lists; of the defaults where they do not compose either."""
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from fcl_bench.composition import composed

    hydra = GlobalHydra.instance()
    before = hydra.hydra
    hydra.clear()
    try:
        return OmegaConf.to_container(composed(chosen))
    finally:
        hydra.hydra = before


def _dotted(node: Any, prefix: str = "") -> list[str]:
    """Every key in nested mappings, `a` and `a.b`."""
    if not isinstance(node, dict):
        return []
    named = [(f"{prefix}{key}", value) for key, value in node.items() if key != "_target_"]
    return [one for name, value in named for one in (name, *_dotted(value, f"{name}."))]


def _keys_beside(key: str, top: Any) -> list[str]:
    """The keys that share the parent of `key`; those at the top if it has no parent there."""
    parent = key.rpartition(".")[0]
    node = top
    for part in parent.split(".") if parent else ():
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return list(top)
    return [f"{parent}.{name}" if parent else name for name in node if name != "_target_"]
