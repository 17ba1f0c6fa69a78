"""The composed configuration as typed dataclasses, converted and checked once, so later code meets no wrong value."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Collection
from dataclasses import MISSING, dataclass
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from fcl_bench.environment import CUDNN_CHOICES
from fcl_bench.errors import UserError, first_line
from fcl_bench.files import user_path
from fcl_bench.typed import typed_instance

if TYPE_CHECKING:
    from fcl_bench.backbones.backbone import Backbone
    from fcl_bench.data.partitions.base import Partition
    from fcl_bench.data.sources.base import Source
    from fcl_bench.data.splits.base import TaskSplit
    from fcl_bench.engine.transport import TransportChoice
    from fcl_bench.execution.adapt import FirstStage
    from fcl_bench.options.faults.choices import Faults
    from fcl_bench.options.noise.gaussian import Gaussian
    from fcl_bench.options.none import NoOption
    from fcl_bench.options.secure.base import SecureSums
    from fcl_bench.protocol.method import Method

#: Each group's choice names its class in `_target_`, a dataclass of the choice's knobs -> the attribute by which such a
#: class is recognised.
_DOES = {
    "method": "server",
    "backbone": "open",
    "data": "load",
    "split": "cut",
    "partition": "holdings",
    "adapt": "trains_network",
    "faults": "fails",
    "noise": "noisy",
    "secure": "sums",
    "transport": "connect",
}
GROUPS = tuple(_DOES)
STATISTICS_DTYPES = ("float64", "float32")
#: `wire.dtype`, by torch's names.
WIRE_DTYPES = ("float64", "float32", "bfloat16", "float16")
#: Keys that are not part of a run: other things to run, and loggers, whose classes have a `start`.
_OUTSIDE = ("hydra", "grid", "budget", "logger")
#: In C, which takes a tenth of OmegaConf's time.
YAML_LOADER, YAML_DUMPER = getattr(yaml, "CSafeLoader", yaml.SafeLoader), getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _of_variant(working: Any, published: Any, _parent_: Any) -> Any:
    """`${variant:a,b}` in a YAML: a if the knob `variant`, in this or an enclosing mapping, is "working", else b.

    Hydra composes it like any other value, so a key that the user types wins over either variant.
    """
    node = _parent_
    while "variant" not in node:
        node = node._get_parent()
    return published if node["variant"] == "published" else working


OmegaConf.register_new_resolver("variant", _of_variant, replace=True)


def knob(
    default: Any = MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    words: str = "",
    choices: Collection[str] = (),
    filled: bool = False,
    of: str = "",
    identity: bool = True,
    neutral: Any = MISSING,
) -> Any:
    """A dataclass field whose value `typed_instance` checks.

    Null passes if the field's type allows it. Each entry of a list or a mapping is checked.

    Args:
        default: the default, or a function such as `list` that makes one; left out: the field has to be given.
        least, above, most, below: limits of a number, which also has to be finite.
        words: the limits in words ("a share, 0 to 1"); "": the limits themselves are printed.
        choices: the allowed texts; together with limits for a field that takes both texts and numbers.
        filled: whether a text has to hold more than blanks; `words` is then an example.
        of: `key=value,...` of this dataclass or of one around it: with other values nothing reads the knob, and setting
            it is an error. `key` alone stands for any value but null, false, none and 0.
        identity: whether the value determines the result. A path or a number of workers does not, so it is not part of
            the run id.
        neutral: a value that changes nothing, so that runs from before there was the knob keep their ids.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    given = {name: limit for name, limit in bounds.items() if limit is not None}
    metadata = {"bounds": given, "words": words, "choices": choices, "filled": filled}
    metadata |= {"of": of, "identity": identity, "neutral": neutral}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Wire:
    """`wire`: how messages travel (see `protocol.message.WireFormat`)."""

    dtype: str = knob(choices=WIRE_DTYPES)
    gram: str = knob(choices=("full", "packed"))
    columns: str = knob(choices=("task", "held"))
    projection: str = knob(choices=("seed", "matrix"))
    factors: str = knob("dtype", choices=("dtype", "int8"))


@dataclass
class Cache:
    """`cache`: where extracted features are kept."""

    enabled: bool
    dir: str = knob(filled=True, words="a folder, such as cache.dir=outputs/cache")


@dataclass
class HeldOut:
    """`data.validation` and `data.test`: what a run is tested on. Every choice of the group `data` has them.

    Attributes:
        validation: the share of each client's training samples that no client trains on; 0: none.
        test: whether the test set is looked at; if not, validation samples take its place in all of the run's results.
    """

    validation: float = knob(0.0, least=0, below=1, words="a share, 0 to below 1")
    test: bool = True

    def __post_init__(self) -> None:
        if not self.test and not self.validation:
            raise UserError("data.test=false leaves nothing to test on", "data.validation=0.1 beside it")


HELD_OUT = tuple(field.name for field in dataclasses.fields(HeldOut))


@dataclass
class _Scalars:
    """The top-level keys."""

    device: str = knob(identity=False)
    force: bool = knob(identity=False)
    preview: bool = knob(identity=False)
    experiment: str | None = knob(identity=False)
    track: str | None = knob(identity=False)
    profile: str = knob(identity=False)
    wire: Wire = knob()
    out: str = knob(filled=True, words="a folder, such as out=outputs", identity=False)
    # Declared below `out`, whose folder it takes over, so that errors name the key that was typed.
    cache: Cache = knob(identity=False)
    seed: int = knob(least=0)
    # Partitions that have a beta take it from here, and count it.
    beta: float = knob(least=1e-6, identity=False)
    clients: int = knob(least=1)
    tasks: int = knob(least=1)
    label_rate: float = knob(above=0, most=1)
    drift: int = knob(least=0)
    dtype: str = knob(choices=STATISTICS_DTYPES)
    checkpoint_rounds: int = knob(least=1, identity=False)
    evaluate_rounds: int = knob(0, least=0)
    on_bad_upload: str = knob("fail", choices=("fail", "drop"))
    robust_groups: int = knob(0, least=0, neutral=0)
    client_share: float = knob(1.0, above=0, most=1, neutral=1.0)
    predictions: bool = False
    details: bool = knob(False, identity=False)
    # Clients side by side, and algorithms chosen by their time, round differently.
    parallel_clients: str = "1"
    cudnn: str = knob("deterministic", choices=CUDNN_CHOICES)
    # Sums round by it, so it follows from the sizes alone, as the number of cores does not: no part of the run id.
    threads: int | str = knob(
        "auto", least=1, most=1024, words="an integer, 1 to 1024", choices=("auto",), identity=False
    )

    def __post_init__(self) -> None:
        user_path("out", self.out)
        user_path("cache.dir", self.cache.dir)
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise UserError(f"device={self.device} is not known", "auto, cpu, cuda or cuda:N")
        if not re.fullmatch(r"auto|[1-9]\d{0,3}", self.parallel_clients):
            raise UserError(f"parallel_clients={self.parallel_clients} is not known", "auto, or 1 to 9999 clients")

    @property
    def drops(self) -> bool:
        """Whether a bad upload is left out instead of ending the run."""
        return self.on_bad_upload == "drop"


_NEUTRAL = {own.name: own.metadata.get("neutral", MISSING) for own in dataclasses.fields(_Scalars)}
#: The top-level keys that older runs do not have -> the values that change nothing.
NEUTRAL = {name: value for name, value in _NEUTRAL.items() if value is not MISSING}


@dataclass
class Settings:
    """A whole run: the top-level keys, one object per group, and the resolved configuration they came from."""

    scalars: _Scalars
    method: Method
    backbone: Backbone
    data: Source
    split: TaskSplit
    partition: Partition
    adapt: NoOption | FirstStage
    faults: NoOption | Faults
    noise: NoOption | Gaussian
    secure: NoOption | SecureSums
    transport: TransportChoice
    held_out: HeldOut
    resolved: dict[str, Any]

    @property
    def beta(self) -> float | None:
        """Concentration of the partition's Dirichlet law; None for a partition without one."""
        return getattr(self.partition, "beta", None)

    @property
    def simulates_sums(self) -> bool:
        """Whether the masks of secure sums follow from the seed, since the server's process has all the clients."""
        return self.secure.sums and self.transport.sees_everything

    def identity(self) -> dict[str, Any]:
        """The part of the configuration that determines the result: no paths, no worker counts, no output folder."""
        chosen = {group: _identity(getattr(self, group)) for group in GROUPS if group != "transport"}
        if self.held_out.validation:
            chosen["held_out"] = counting(self.held_out)
        # All transports give the same bits; a knob that lets a round go on without some clients may not.
        if partial := self.transport.identity():
            chosen["transport"] = partial
        # No run has some rounds under keys of the clients' own, and others under keys that the server could work out.
        if self.secure.sums and not self.simulates_sums:
            chosen["secure"]["keys"] = "system"
        return {**counting(self.scalars), "beta": self.beta, **chosen}


def _identity(choice: Any) -> dict[str, Any]:
    # The module is left out, so that a class can move. A name that is a knob distinguishes data sets or networks that
    # share a class.
    named = any(field.name == "name" for field in dataclasses.fields(choice))
    kind = type(choice).__qualname__ if named else choice.name
    revision = {"revision": choice.revision} if hasattr(choice, "revision") else {}
    # Not where a file lies but what it holds determines the result.
    contents = choice.contents() if hasattr(choice, "contents") else {}
    return {"choice": kind, **revision, **counting(choice), **contents}


def counting(choice: Any) -> dict[str, Any]:
    """The knobs of a dataclass, nested ones included, that are part of a run's identity."""
    found = {}
    for field in dataclasses.fields(choice):
        value = getattr(choice, field.name)
        if field.metadata.get("identity", True) and value != field.metadata.get("neutral", MISSING):
            found[field.name] = counting(value) if dataclasses.is_dataclass(value) else copy.deepcopy(value)
    return found


def load_settings(config: DictConfig) -> Settings:
    """Convert a composed configuration. Raises a `UserError` for an unknown key, wrong type or impossible value."""
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = error.full_key or "a key"
        raise UserError(f"{key} has no value", f"{key}=...") from error
    except OmegaConfBaseException as error:
        raise UserError(
            f"{error.full_key or 'the configuration'}: {first_line(error)}", "a value without a broken ${...}"
        ) from error
    assert isinstance(resolved, dict)
    plain: dict[str, Any] = {str(key): value for key, value in resolved.items() if key not in _OUTSIDE}
    # They are checked before the groups, which take over some of their values, so that errors name the keys that the
    # user typed.
    scalars = typed_instance(_Scalars, {key: value for key, value in plain.items() if key not in GROUPS}, "")
    groups = {}
    common = {"data": HELD_OUT}
    for group in GROUPS:
        node = plain.get(group)
        if not isinstance(node, dict):
            raise UserError(
                f"{group}={node} is not a configuration",
                f"a choice of the group {group}; see fcl-bench --help",
            )
        knobs = {name: value for name, value in node.items() if name not in {"_target_", *common.get(group, ())}}
        groups[group] = typed_instance(target_class(group, node.get("_target_")), knobs, group)
    given = {name: value for name, value in plain["data"].items() if name in HELD_OUT}
    held_out = typed_instance(HeldOut, given, "data")
    plain.pop("details", None)  # config.yaml is not about the terminal
    return Settings(scalars, **groups, held_out=held_out, resolved=plain)


def target_class(group: str, path: Any) -> type:
    """The dataclass that `<group>._target_` names."""
    module, _, name = str(path).rpartition(".")
    remedy = "module.Class of an installed package, or of a folder in PYTHONPATH"
    if not re.fullmatch(r"\w+(\.\w+)+", str(path)):
        raise UserError(f"{group}._target_={path} names no class", remedy)
    try:
        found = getattr(import_module(module), name, None)
    except Exception as error:
        if module.startswith("fcl_bench.") and not isinstance(error, ModuleNotFoundError):
            raise  # a bug of ours
        if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
            remedy = f"python -c 'import {module}' shows where"
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{group}._target_={path} cannot be imported: {why}", remedy) from error
    if found is None:
        raise UserError(f"{group}._target_={path} cannot be imported: {module} has no {name}", remedy)
    # A class that extends a dataclass is none itself: its own knobs would be ignored.
    if not (isinstance(found, type) and "__dataclass_fields__" in vars(found)):
        raise UserError(f"{group}._target_={path} is not a dataclass", f"a class of the group {group} with @dataclass")
    if not hasattr(found, _DOES.get(group, "start")):
        raise UserError(f"{group}._target_={path} is of another group", f"a class of the group {group}")
    if inspect.isabstract(found):
        raise UserError(
            f"{group}._target_={path} is abstract: it only says what such classes have in common",
            f"a class of the group {group} that lacks nothing",
        )
    if lack := _lacks(found):
        raise UserError(f"{group}._target_={path} {lack}", "what docs/how-to/adding.md says of such a class")
    return found


def _lacks(kind: type) -> str:
    """What a class of a group has not that its base classes declare, in words; "": nothing."""
    fields = {field.name for field in dataclasses.fields(kind)}
    declared = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())} - fields
    for name in ("name", "client_half", "server_half"):
        if name not in declared:
            continue
        if (found := getattr(kind, name, None)) is None:
            return f"has no {name}"
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            return f"has the {name} {found.__name__}, which has no {', '.join(missing)}"
    return ""


def text(value: Any) -> str:
    """A value as the user types it (0.1, 2048, true, null); "" where a run has no such key (None, NaN, NA)."""
    # Tables ask this of each cell, so what most cells hold comes first.
    if isinstance(value, str | bool):
        return str(value).lower() if isinstance(value, bool) else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if is_number(value):
        short = str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"
        return short if float(short) == value else repr(float(value))
    # Imported only now: composing a run or asking for help need not wait for pandas.
    from pandas import isna
    from pandas.api.types import is_bool

    if is_bool(value):
        return str(value).lower()
    return "" if isna(value) else str(value)


def number_text(typed: str) -> str:
    """A typed finite number (0.10, 1e-1) as `text` writes it (0.1); anything else unchanged."""
    try:
        number = float(typed)
    except ValueError:
        return typed
    return text(number) if math.isfinite(number) else typed


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number (NumPy's included) and not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
