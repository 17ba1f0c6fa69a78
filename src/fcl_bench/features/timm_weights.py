"""A timm network with its weights: the hub's, a local checkpoint's, or random ones."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fcl_bench.errors import UserError, choices, first_line

log = logging.getLogger(__name__)

#: What torch and safetensors raise for a file that is damaged, of another kind, or holds code instead of tensors.
_LOADING_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    EOFError,
    AttributeError,
    TypeError,
    pickle.UnpicklingError,
    SafetensorError,
)


def random_network(name: str, model_args: dict[str, Any]) -> torch.nn.Module:
    """A network without classifier and with random weights from torch's generator, in train mode on the CPU.

    Raises:
        UserError: timm has no such network, or refuses the arguments.
    """
    import timm

    architecture = _architecture(name)
    try:
        timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise UserError(f"backbone.name={name}: {first_line(error)}", choices(_tagged(architecture), name)) from error
    return _create(name, model_args, pretrained=False)


def hub_network(name: str, model_args: dict[str, Any]) -> torch.nn.Module:
    """The network without classifier that the hub (or its cache on this machine) holds under the full name `arch.tag`.

    Raises:
        UserError: timm has no such network or weights, refuses the arguments, or the hub is out of reach.
    """
    architecture = _architecture(name)
    tag = name.partition(".")[2]
    tagged = _tagged(architecture)
    if not tag or name not in tagged:
        what = "names no weights" if not tag else f"timm has no weights {tag} for {architecture}"
        raise UserError(
            f"backbone.name={name} {what}",
            f"backbone.checkpoint=FILE, or a name: {choices(tagged, name)}",
        )
    log.info("weights %s: from the hub, or its cache on this machine", name)
    return _create(name, model_args, pretrained=True)


def _architecture(name: str) -> str:
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise UserError(f"backbone.name={name}: timm has no {architecture}", choices(timm.list_models(), architecture))
    return architecture


def _tagged(architecture: str) -> list[str]:
    import timm

    return [name for name in timm.list_pretrained() if name.partition(".")[0] == architecture]


def _create(name: str, model_args: dict[str, Any], pretrained: bool) -> torch.nn.Module:
    import timm

    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **model_args)
    except (TypeError, LookupError, ValueError, AssertionError, AttributeError) as error:
        if not model_args:
            raise
        raise UserError(
            f"backbone.model_args={model_args} failed ({type(error).__name__}: {first_line(error)})",
            f"arguments of timm's {name}",
        ) from error
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise UserError(
            f"backbone.name={name}: weights could not be fetched from the hub: {first_line(error)}",
            "backbone.checkpoint=FILE with those weights, or a machine with network to fill the hub's cache",
        ) from error


def read_checkpoint(path: str) -> dict[str, torch.Tensor]:
    """The state dict in a .safetensors, .pth or .pt file; no code in it is run.

    Raises:
        UserError: the file is damaged, or holds something else.
    """
    from timm.models import load_state_dict

    key = f"backbone.checkpoint={path}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = load_state_dict(str(Path(path).expanduser()), device="cpu", weights_only=True)
    except _LOADING_ERRORS as error:
        # Not the library's own advice: for a pickle it is to load it unsafely.
        raise UserError(
            f"{key} cannot be loaded ({type(error).__name__})", "an undamaged state dict that holds only tensors"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UserError(f"{key} holds no state dict", "a flat mapping of names to tensors")
    return state


def load_weights(model: torch.nn.Module, state: dict[str, torch.Tensor], name: str, path: str) -> None:
    """Load `state` strictly, the classifier apart: features don't need it.

    Raises:
        UserError: an entry is missing, unexpected or of another shape; told with the network's `name` and the `path`.
    """
    key = f"backbone.checkpoint={path}"
    remedy = "weights of exactly this architecture; see backbone.name, backbone.model_args and backbone.stem"
    classifier = model.pretrained_cfg.get("classifier") or ()  # type: ignore[union-attr, operator]
    heads = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    state = {
        entry: value for entry, value in state.items() if not entry.startswith(tuple(f"{head}." for head in heads))
    }
    wanted = model.state_dict()
    for trouble, entries in (
        ("lacks", wanted.keys() - state.keys()),
        ("has the unexpected", state.keys() - wanted.keys()),
    ):
        if entries:
            raise UserError(f"{key} {trouble} {min(entries)} ({len(entries)} such entries) for {name}", remedy)
    for entry, value in state.items():
        if value.shape != wanted[entry].shape:
            raise UserError(
                f"{key}: {entry} has shape {tuple(value.shape)}, {name} needs {tuple(wanted[entry].shape)}", remedy
            )
    model.load_state_dict(state, strict=True)
