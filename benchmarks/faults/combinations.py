"""Combine choices of all groups and knobs at random: each is refused in one line, or runs and reads what was set."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.forks import forked, quiet
from benchmarks.faults.part import Part, draw
from benchmarks.faults.scenarios import fresh, write_features, write_images
from tests.small_methods import ALIASES, NAMES, short_run

#: Printed before the keys that a run was given and nothing read, and before the command.
_UNREAD, _TYPED = "unread:", "typed:"
_SPLITS = ("class_incremental", "class_overlap", "domain_incremental", "asynchronous", "si_blurry", "given")
_PARTITIONS = (
    "dirichlet",
    "dirichlet_all_classes",
    "dirichlet_equal_sizes",
    "dirichlet_power_law",
    "iid",
    "shards",
    "published",
    "given",
)
_TINY = ("backbone=tiny", "backbone.width=4", "backbone.size=8")
_TIMM = ("backbone=timm", "backbone.pretrained=false", "backbone.transform.size=32")
_BACKBONES = (
    (*_TINY,),
    (*_TINY, "backbone.architecture=vit"),
    (*_TIMM, "backbone.name=test_vit", "+backbone.model_args.img_size=32"),
    (*_TIMM, "backbone.name=test_byobnet"),
    ("backbone=pixels",),
    ("backbone=identity",),
    ("backbone=sentence",),
)
_NOISES = (
    ("noise.epsilon=8",),
    ("noise.multiplier=0",),
    ("noise.epsilon=4", "noise.unit=client"),
    ("noise.multiplier=1", "noise.unit=client", "noise.clip=0.5"),
    ("noise.epsilon=8", "noise.share_of=2"),
)
_FAULTS = (
    ("faults=random",),
    ("faults=random", "faults.late=0.3", "faults.late_unit=task", "faults.min_clients=0"),
    ("faults=random", "faults.late_by=2"),
    ("faults=listed", "faults.silent=[1@0]"),
    ("faults=listed", "faults.late=[0@0]", "faults.gone=[2@1]"),
    ("faults=listed",),
)
_TRANSPORTS = (
    *[("transport=tree", "transport.fan_in=2"), ("transport=tree",), ("transport=in_process",)],
    *[("transport=ranks",), ("transport=flower",)],
)
_OTHERS = (
    *("beta=1", "label_rate=0.5", "wire.dtype=float16", "wire.gram=packed", "wire.columns=held", "dtype=float32"),
    *("wire.factors=int8", "wire.projection=matrix", "on_bad_upload=drop", "evaluate_rounds=1", "data.validation=0.2"),
    *(
        "drift=2",
        "predictions=true",
        "parallel_clients=2",
        "data.test=false",
        "threads=1",
        "adapt=fedavg adapt.training.rounds=1 adapt.training.epochs=1",
    ),
)
#: Knobs that name files or what is compiled or downloaded, or would make a run long.
_LEFT_ALONE = re.compile(
    r".*\.(name|path|repo|file|folder|checkpoint|compile|model_args|about|link|ca|key|leave_out)\b.*"
)


class Combinations(Part):
    """Cases are numbers, from each of which a command line is drawn."""

    name, quick, full = "combinations", 6, 200

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        super().__init__(scratch, seed)
        self._outcome = ""
        write_features(scratch / "features.npz")
        write_images(scratch / "images")
        rows = [f"{number % 3},{number},{number * number % 7},{number % 2}" for number in range(60)]
        (scratch / "table.csv").write_text("\n".join(["label,a,b,client", *rows]) + "\n")
        with quiet():
            self._run(["method=afl", "data=digits", "clients=2", "tasks=2"])  # what every run imports

    def cases(self, most: int) -> Sequence[str]:
        return [str(number) for number in range(most or self.full)]

    def tried(self, case: str) -> str:
        ended = forked(self._work(draw(self.seed, "combination", case)), seconds=300, room=8 << 30)
        self._outcome = {0: "ran", 2: "refused"}.get(ended.code, "")
        typed = re.findall(rf"^{_TYPED} (.*)$", ended.out, re.MULTILINE)
        unread = re.findall(rf"^{_UNREAD} (.*)$", ended.out, re.MULTILINE)
        trouble = ended.trouble() or "".join(f"nothing read {keys}" for keys in unread)
        return f"{trouble}: {' '.join(typed)}" if trouble else ""

    def count(self, case: str) -> str:
        return self._outcome

    def _work(self, drawn: random.Random) -> Callable[[], int]:
        def work() -> int:
            typed = self._drawn(drawn)
            typed += self._knobs(typed, drawn)
            print(_TYPED, *typed)
            return self._run(typed)

        return work

    def _drawn(self, drawn: random.Random) -> list[str]:
        """A choice of each group; most are the usual ones, or else no run would be accepted."""
        method = drawn.choice([*NAMES, *ALIASES])
        own = [one for one in short_run(ALIASES.get(method, method))[1:] if not one.startswith("backbone")]
        backbone = drawn.choice(_BACKBONES[:3] if any("training" in one for one in own) else _BACKBONES)
        data = ["data=digits"] if drawn.random() < 0.7 else drawn.choice(self._data())
        if drawn.random() < 0.9:  # mostly one that reads such samples
            images = data[0] in ("data=digits", "data=imagefolder")
            backbone = (
                ("backbone=identity",) if not images else backbone if backbone in _BACKBONES[:5] else _BACKBONES[0]
            )
        typed = [f"method={method}", *own, *data, *backbone]
        typed += [f"clients={drawn.randint(2, 4)}", f"tasks={drawn.randint(2, 3)}", f"seed={drawn.randint(0, 9)}"]
        if any("training" in one for one in own) and backbone[0] == "backbone=identity":
            typed += ["method.trains=features"]
        for share, options in (
            (0.2, [[f"split={split}"] for split in _SPLITS]),
            (0.35, [[f"partition={partition}"] for partition in _PARTITIONS]),
            (0.15, _TRANSPORTS),
            (0.12, [["secure=sums"], ["secure=sums", "secure.neighbours=2"], ["secure=sums", "secure.bits=32"]]),
            (0.12, [["noise=gaussian", *own] for own in _NOISES]),
            (0.2, _FAULTS),
            (0.4, [one.split() for one in _OTHERS]),
            (0.15, [one.split() for one in _OTHERS]),
        ):
            typed += drawn.choice(options) if drawn.random() < share else []
        return typed

    def _data(self) -> list[list[str]]:
        return [
            ["data=features", f"data.path={self.scratch / 'features.npz'}"],
            ["data=imagefolder", f"data.path={self.scratch / 'images'}"],
            ["data=table", f"data.path={self.scratch / 'table.csv'}"],
            ["data=text", f"data.path={self.scratch / 'table.csv'}"],
            ["data=sites", f"data.path={self.scratch / 'features.npz'}"],
        ]

    def _knobs(self, typed: list[str], drawn: random.Random) -> list[str]:
        """Up to three other values of knobs of what is chosen; none where the choices alone are refused."""
        from fcl_bench.composition import composed
        from fcl_bench.config import load_settings
        from tests.read_keys import parts_of

        try:
            settings = load_settings(composed(typed))
        except Exception:  # the run itself says what is wrong
            return []
        found = []
        for key, part in parts_of(settings).items():
            for field in dataclasses.fields(part):
                value, name = other(vars(part).get(field.name), field.metadata, drawn), f"{key}.{field.name}"
                if value is not None and f"{name}=" not in " ".join(typed) and not _LEFT_ALONE.fullmatch(f"{name} "):
                    found.append([f"{name}={value}", *_beside(key, settings, field.metadata.get("of", ""), drawn)])
        return list(itertools.chain(*drawn.sample(found, min(len(found), drawn.randint(0, 3)))))

    def _run(self, typed: list[str]) -> int:
        """The command itself, whose reads are recorded."""
        import fcl_bench.execution.run as execution
        from fcl_bench.cli.app import main
        from tests.read_keys import keys_of, recorded

        run = execution.run
        given = [one.partition("=")[0] for one in typed]

        def watched(settings: Any, *others: Any) -> Any:
            known = keys_of(settings)
            with recorded(settings) as seen:
                outcome = run(settings, *others)
            unread = [key for key in given if key in known and known[key] not in seen]
            if unread:
                print(_UNREAD, *unread)
            return outcome

        execution.run = watched
        out = fresh(self.scratch / "out")
        sys.argv = ["fcl-bench", *typed, f"out={out}", "cache.enabled=false"]
        try:
            return main()
        finally:
            execution.run = run


def _beside(key: str, settings: Any, of: str, drawn: random.Random) -> list[str]:
    """Mostly what a knob of the part `key` is read with (see `knob`), where it is one key and some values."""
    name, _, values = of.partition("|")[0].partition("=")
    if not values or drawn.random() < 0.15:
        return []
    holder = key
    while not hasattr(functools.reduce(getattr, holder.split("."), settings), name):
        holder = holder.rpartition(".")[0]
        if not holder:
            return []
    value = drawn.choice(values.split(","))
    return [f"{holder}.{name}={value}", *([f"{holder}.milestones=[1]"] if value == "step" else [])]


def other(value: Any, metadata: Any, drawn: random.Random) -> Any:
    """Another value that a knob may have; None: there is none that is surely small."""
    if texts := [text for text in metadata.get("choices", ()) if text != value]:
        return drawn.choice(texts)
    if isinstance(value, bool):
        return str(not value).lower()
    bounds = metadata.get("bounds", {})
    most = min(bounds.get("most", np.inf), bounds.get("below", np.inf))
    if isinstance(value, int):
        return value + 1 if value + 1 <= most else value - 1
    if isinstance(value, float):
        return value / 2 if value else min(0.5, most / 2)
    return None
