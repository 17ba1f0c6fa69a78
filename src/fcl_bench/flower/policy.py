"""A site's policy: what may leave it. The node decides, from the very message that is about to leave.

A server may order any method with any knob. What is sent is made by the site's own installed code, which says of each
tensor over which samples it is (`Message.groups`, `Field.leaks`); the rules are about that, and not about names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from fcl_bench.config import Settings, knob
from fcl_bench.data.sources.array_files import SiteFile
from fcl_bench.engine.node import samples_in
from fcl_bench.errors import UserError
from fcl_bench.files import user_path
from fcl_bench.flower.refusals import KEEPS_SAMPLES, RUN_FORBIDDEN, TOO_FEW, Refusal
from fcl_bench.protocol.context import ClientData, State
from fcl_bench.protocol.fields import CLASSES, Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client
from fcl_bench.results.signing import read_key
from fcl_bench.typed import typed_instance

#: The file that `fcl-bench-node init` copies: the defaults of `Policy`, each with its meaning.
TEMPLATE = Path(__file__).with_name("policy.yaml")


@dataclass(frozen=True)
class Policy:
    """The keys of policy.yaml, which says what each means."""

    own_data: bool = True
    smallest_group: int = knob(5, least=1)
    keep_samples: bool = False
    methods: list[str] | None = None
    packages: list[str] | None = knob(lambda: ["fcl_bench"])
    epsilon: float | None = knob(None, above=0)
    messages_per_day: int | None = knob(1000, least=0)
    server: str | None = None
    peers: str | None = None

    @classmethod
    def read(cls, given: str | None) -> Policy:
        """The policy of `policy=...`: a YAML file, "none", or the defaults where nothing is given.

        Raises:
            UserError: the file is no policy.
        """
        if given is None or given == "none":
            return OPEN if given else cls()
        path = user_path("policy", given)
        try:
            found = dict(yaml.safe_load(path.read_text()))
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else "has no lines KEY: VALUE"
            raise UserError(f"policy={given} {what}", "fcl-bench-node init, which writes one") from error
        return typed_instance(cls, {str(key): value for key, value in found.items()}, "policy")

    @cached_property
    def server_key(self) -> Any | None:
        """The key that signs what the node answers. Raises a `UserError` for a file that has none."""
        return None if self.server is None else read_key("policy.server", self.server, "public")

    def require_classes(self, config: Mapping[str, Any]) -> None:
        """Raise a `Refusal` unless all classes that a run names are of allowed packages; none is imported before."""
        for group, node in config.items():
            target = str(node.get("_target_", "")) if isinstance(node, Mapping) else ""
            if target and self.packages is not None and target.partition(".")[0] not in self.packages:
                remedy = f"policy packages={self.packages}"
                raise Refusal(RUN_FORBIDDEN, f"{group}._target_={target} is refused", remedy)

    def require_run(self, settings: Settings, own: Mapping[str, Any]) -> None:
        """Raise a `Refusal` unless a run with these settings may use this site's samples.

        Args:
            own: the keys that the node's own command gives.
        """
        method = settings.method
        if self.methods is not None and method.name not in self.methods:
            raise Refusal(RUN_FORBIDDEN, f"method={method.name} is refused", f"policy methods={self.methods}")
        if self.own_data and not (isinstance(settings.data, SiteFile) and "data.path" in own):
            why = f"data={settings.data.name} is refused: policy own_data=true"
            raise Refusal(RUN_FORBIDDEN, why, "data=sites, with data.path=FILE in this node's command")
        if self.own_data and (files := [name for name in method.contents() if f"method.{name}" not in own]):
            raise Refusal(RUN_FORBIDDEN, f"method.{files[0]} names a file of this site", "own_data=false in the policy")
        if settings.simulates_sums or (self.peers is not None and not settings.secure.sums):
            why = f"secure={settings.secure.name} with transport={settings.transport.name} is refused"
            raise Refusal(RUN_FORBIDDEN, why, "secure=sums transport=flower, or no peers= in the policy")
        noise: Any = settings.noise
        secret = isinstance(settings.data, SiteFile) and getattr(noise, "epsilon", None) is not None
        if self.epsilon is not None and not (secret and not noise.share_of and noise.delta <= 1e-5):
            why = f"noise={noise.name} is refused: policy epsilon={self.epsilon:g}"
            raise Refusal(RUN_FORBIDDEN, why, "noise=gaussian noise.epsilon=... with noise.delta of at most 1e-5")

    def require_groups(self, fields: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise a `Refusal` if a field is over too few samples; `fields` as `described` returns them."""
        for name, about in fields.items():
            if about["least"] is not None and about["least"] < self.smallest_group:
                why = f"{name} holds sums over {about['least']} samples: policy smallest_group={self.smallest_group}"
                raise Refusal(TOO_FEW, f"the upload is refused: {why}", "another method, or no classes with so few")


#: `policy=none`: for data that anybody may have.
OPEN = Policy(False, 1, keep_samples=True, packages=None, messages_per_day=None)


def described(upload: Message, stage: str, uploads: Uploads, labels: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Of each tensor of an upload its shape, and of how many samples its smallest sum is; None: of none at all.

    A tensor of which nothing else is said is one sum of all samples: what training sends is made of them together.
    Tensors that one name with "*" declares, such as a network's weights, are described together.

    Args:
        upload: as the client half made it, with `groups`.
        labels: (n,) classes of the samples that it is of.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in upload.items():
        own = uploads.field(stage, name)
        by_class = labels if own is not None and own.leaks and own.columns == CLASSES else None
        which = upload.groups.get(name, by_class)
        sizes = [len(labels)] if which is None else torch.bincount(which.cpu() + 1)[1:].tolist()
        least = min((size for size in sizes if size), default=None)
        stars = (key for key, other in uploads.declared.get(stage, {}).items() if key.endswith("*") and other is own)
        if (key := next(stars, name)) in found:
            count, least = found[key]["tensors"], min(filter(None, (least, found[key]["least"])), default=None)
            found[key] = {"tensors": count + 1, "least": least}
        else:
            found[key] = {**({"shape": list(tensor.shape)} if key == name else {"tensors": 1}), "least": least}
    return found


class Guarded(Client):
    """A client half whose uploads are looked at before anything else happens to them."""

    def __init__(self, half: Client, policy: Policy, uploads: Uploads) -> None:
        self._half, self._policy, self._uploads = half, policy, uploads
        #: Of the last upload, as `described`.
        self.fields: dict[str, dict[str, Any]] = {}

    def pseudo_labels(self, client_data: ClientData) -> torch.Tensor | None:
        return self._half.pseudo_labels(client_data)

    def update(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        upload, after = self._half.update(client_data, broadcast, state)
        self.fields = described(upload, broadcast.stage, self._uploads, client_data.labels)
        self._policy.require_groups(self.fields)
        if not self._policy.keep_samples and (kept := samples_in(after)):
            why = f"the client would keep {kept} samples: policy keep_samples=false"
            raise Refusal(KEEPS_SAMPLES, why, "a method without exemplars")
        return upload, after
