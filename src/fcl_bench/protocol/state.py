"""The state of a server half as tensors: an object names the attributes that a resumed run needs, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def saved(owner: object, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The attributes of these names as tensors.

    A tensor is saved under its attribute's name; a mapping of tensors, and the state of an object that has `state_dict`
    and `load_state_dict`, as `<attribute>.<key>` each; anything else that JSON can hold (numbers, texts, None, tuples,
    sets, mappings) as the bytes of its JSON.
    """
    found: dict[str, torch.Tensor] = {}
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif hasattr(value, "state_dict"):
            found |= {f"{name}.{key}": own for key, own in value.state_dict().items()}
        elif _of_tensors(value):
            found |= {f"{name}.{json.dumps(key)}": own for key, own in value.items()}
        else:
            plain = list(value.items()) if isinstance(value, Mapping) else value
            plain = sorted(plain) if isinstance(plain, set | frozenset) else plain
            found[f"{name}!"] = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    return found


def restore(owner: Any, names: Iterable[str], state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the attributes of these names to what `saved` returned.

    Tensors come to the device in the type in which they were saved. Other values get the type of the attribute's
    present value (a set stays a set), and lists within them become tuples.
    """
    for name in names:
        present = getattr(owner, name)
        own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        on_device = {key: value.to(device) for key, value in own.items()}
        if f"{name}!" in state:
            setattr(owner, name, _as_before(present, json.loads(bytes(state[f"{name}!"].tolist()))))
        elif name in state:
            setattr(owner, name, state[name].to(device))
        elif hasattr(present, "load_state_dict"):
            present.load_state_dict(on_device)
        else:
            setattr(owner, name, {json.loads(key): value for key, value in on_device.items()})


def _of_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(own, torch.Tensor) for own in value.values())


def _as_before(present: Any, value: Any) -> Any:
    """What JSON gave back, in the type of the present value."""
    if not isinstance(value, list):
        return value
    inner = [tuple(own) if isinstance(own, list) else own for own in value]
    if isinstance(present, Mapping):
        return dict(inner)
    return type(present)(inner) if isinstance(present, tuple | set | frozenset) else inner
