"""One HTML file with its styles, scripts and data inside, and a policy that forbids all else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined


def asset(name: str, package: str = __package__) -> str:
    """Return the text of a file of a package: by default, of what pages share."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def as_json(value: object) -> str:
    """Return a value as JSON for a script element, which only "<" could end; NaN is refused."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def document(html: str, scripts: Sequence[str], **values: Any) -> str:
    """Return a template filled with `values`, `scripts` and `policy`, which lets these scripts run and no others."""
    digests = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return environment.from_string(html).render(scripts=scripts, policy=policy, **values)
