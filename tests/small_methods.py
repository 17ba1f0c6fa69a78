"""Every method of conf/method, with knobs that make it small. A new method is found without a line here."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import yaml

from fcl_bench.composition import config_dir
from fcl_bench.config import target_class
from fcl_bench.methods.autoencoders.fedcbc import VAETraining
from fcl_bench.methods.closed_form.base import ClosedFormMethod
from fcl_bench.methods.data_free import fedgen, target
from fcl_bench.methods.data_free.generators import anchored
from fcl_bench.methods.data_free.mfcl import Generation
from fcl_bench.methods.exemplars.proxy import Inversion
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.protocol.method import Method
from fcl_bench.training.knobs import Training

#: A network and a training of a second or two; what it learns is not asked here.
TRAINING = ("backbone=tiny", "backbone.width=4", "method.training.rounds=2", "method.training.epochs=1")
#: The same with a vision transformer.
TRANSFORMER = (*TRAINING, "backbone.architecture=vit")
#: A generator of images that takes a second or two.
_SMALL_GENERATOR = ("method.generator.width=8", "method.generator.noise=8", "method.generator.steps=3")
#: The same of a method that reconstructs images.
_INVERTING = (
    *TRAINING,
    "method.inversion.perturbation=2",
    "method.inversion.iterations=2",
    "method.inversion.images=2",
)
#: Overrides of a short run; of a method without an entry none, and of one that trains, `TRAINING` or
#: `TRANSFORMER`.
_SHORT = {
    "fedran": ("method.M=96", "method.rank=20", "method.complement=floor"),
    "ds_al": ("method.M=96",),
    "ranpac": ("method.M=96",),
    "stsa": ("method.M=96",),
    "air": ("method.M=96",),
    "stsa_e": ("method.M=96", "method.dummy_clients=4"),
    "centred_sketch": ("method.M=96", "method.rank=5"),
    "gaussian_sketch": ("method.M=96", "method.rank=5", "method.class_rank=4"),
    "centralised_ridge": ("method.M=96",),
    "fedlda": ("method.M=96",),
    "fedklda": ("method.M=96",),
    "fot": (*TRAINING, "method.columns=8"),
    "fedprotip": (*TRAINING, "method.columns=8"),
    "target": (
        *TRAINING,
        *("method.synthesis.images=16", "method.synthesis.batch=8", "method.synthesis.noise=8"),
        *("method.synthesis.warmup=1", "method.synthesis.g_steps=2", "method.synthesis.kd_steps=2"),
    ),
    "lander": (
        *TRAINING,
        *("method.anchor_size=8", "method.synthesis.batch=16", "method.synthesis.warmup=1"),
        *("method.synthesis.batches=1", "method.synthesis.g_steps=2", "method.synthesis.kd_steps=2"),
    ),
    "mfcl": (*TRAINING, *_SMALL_GENERATOR, "method.synthetic=8"),
    # The usual third layer of the tasks' prompts is one more than the small network has.
    "dualprompt": (*TRANSFORMER, "method.e_layers=[2,3]"),
    "glfc": _INVERTING,
    "lga": (*_INVERTING, "method.proxy_init=0"),
    # Its usual 16 make four times as many steps.
    "lorm": (*TRANSFORMER, "method.training.batch_size=64"),
    # The tiny transformer has no fifth block.
    **dict.fromkeys(("coda_prompt", "cprompt"), (*TRANSFORMER, "method.layers=[0,1]", "method.components=3")),
    "fedcbc": (
        *("method.training.rounds=2", "method.training.epochs=10", "method.training.lr=0.02"),
        *("method.hidden=32", "method.latent=8", "method.samples=30"),
    ),
}
#: Knobs that make such methods quick where a test makes the method itself.
_QUICK: dict[str, dict[str, Any]] = {
    "target": {"synthesis": target.Synthesis(images=16, batch=8, noise=8, warmup=1, g_steps=2, kd_steps=2)},
    "lander": {
        "anchor_size": 8,
        "synthesis": anchored.Synthesis(batch=8, noise=8, warmup=1, batches=1, g_steps=2, kd_steps=2),
    },
    "mfcl": {"synthetic": 8, "generator": Generation(width=8, noise=8, steps=3)},
    "fedgen": {"generator": fedgen.Generation(steps=5)},
    "dualprompt": {"e_layers": [2, 3]},
    **{name: {"inversion": Inversion(perturbation=2, iterations=2, images=2)} for name in ("glfc", "lga")},
    **{name: {"layers": [0, 1], "components": 3} for name in ("coda_prompt", "cprompt")},
    "fedcbc": {"training": VAETraining(rounds=2, epochs=2), "hidden": 8, "latent": 2, "samples": 5},
}


@functools.cache  # tests ask thousands of times, and YAML takes milliseconds
def class_of(name: str) -> Any:
    """The class that the method's YAML names."""
    content = yaml.safe_load((config_dir() / "method" / f"{name}.yaml").read_text())
    return target_class("method", content["_target_"])


_TYPED = sorted(file.stem for file in (config_dir() / "method").glob("[!_]*.yaml"))
NAMES = [name for name in _TYPED if class_of(name).name == name]
#: Other names that may be typed, and the method that each stands for, with other defaults.
ALIASES = {name: class_of(name).name for name in _TYPED if name not in NAMES}


def trains_by_gradient(name: str) -> bool:
    return issubclass(class_of(name), GradientMethod)


def architecture(name: str) -> str:
    """Of the tiny network that the method trains in tests."""
    return "vit" if trains_by_gradient(name) and class_of(name).inside_transformers else "conv"


def made(name: str, **knobs: Any) -> Method:
    """The method with these knobs, and else its defaults, but for what would take long."""
    return class_of(name)(**{**_QUICK.get(name, {}), **knobs})


def short_run(name: str) -> tuple[str, ...]:
    """The overrides of a short run of this method."""
    usual = TRANSFORMER if architecture(name) == "vit" else TRAINING if trains_by_gradient(name) else ()
    return (f"method={name}", *_SHORT.get(name, usual))


def unlisted(names: Collection[str]) -> list[Method]:
    """The methods of conf/method that are not among `names`, with small knobs."""
    training = Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none")
    found = [name for name in NAMES if name not in names]
    return [made(name, **_knobs(name, training)) for name in found]


def _knobs(name: str, training: Training) -> dict[str, Any]:
    """A method's small knobs: its training, or its random features; none where it has neither."""
    if trains_by_gradient(name):
        return {"training": training}
    return {"M": 8} if issubclass(class_of(name), ClosedFormMethod) else {}
