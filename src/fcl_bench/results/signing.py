"""Signatures of runs: who vouches for a record, by Ed25519 (RFC 8032), in `run.sig` beside run.json."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

from fcl_bench.errors import UserError, installing
from fcl_bench.execution.folder import RunFolder
from fcl_bench.files import replacing, user_path

SIGNATURE = "run.sig"
#: Stands before the record in what is signed, so that no signature of another kind of text is one of a record.
_PURPOSE = b"fcl-bench run record\n"


def sign(folder: Path, key: str) -> str:
    """Sign a run's record, and so every file whose checksum it has; return the public key in base64.

    Args:
        folder: of the run.
        key: PEM file with a private key of Ed25519.

    Raises:
        UserError: the run is incomplete or damaged, or the file is no such key.
    """
    RunFolder(folder).verified()
    private = read_key("--key", key, "private")
    public = _text(private.public_key())
    signature = base64.b64encode(private.sign(_PURPOSE + (folder / "run.json").read_bytes())).decode()
    with replacing(folder / SIGNATURE) as temporary:
        temporary.write_text(json.dumps({"public_key": public, "signature": signature}) + "\n")
    return public


def signer(folder: Path) -> str | None:
    """Return the public key, in base64, of a run's signature, which holds; None for a run without a signature.

    Raises:
        UserError: the signature is not of this record.
    """
    if not (folder / SIGNATURE).exists():
        return None
    ed25519, _, invalid = _cryptography()
    try:
        found = json.loads((folder / SIGNATURE).read_text())
        public = ed25519.Ed25519PublicKey.from_public_bytes(base64.b64decode(found["public_key"], validate=True))
        signed = _PURPOSE + (folder / "run.json").read_bytes()
        public.verify(base64.b64decode(found["signature"], validate=True), signed)
    except (invalid, OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder / SIGNATURE} is no signature of this run.json", "the record as signed") from error
    return _text(public)


def public_key(given: str) -> str:
    """Return a public key in base64, given like that or as a PEM file. Raises a `UserError` for a file without one."""
    return _text(read_key("--signer", given, "public")) if user_path("--signer", given).is_file() else given


def _cryptography() -> tuple[Any, Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise UserError("signatures need the package cryptography", installing("secure")) from error
    return ed25519, serialization, InvalidSignature


def _text(public: Any) -> str:
    return base64.b64encode(public.public_bytes_raw()).decode()


def read_key(option: str, given: str, kind: str) -> Any:
    """Return the "private" or "public" key in a PEM file."""
    ed25519, pem, _ = _cryptography()
    loads = {"private": partial(pem.load_pem_private_key, password=None), "public": pem.load_pem_public_key}
    try:
        key = loads[kind](user_path(option, given).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        remedy = "an unencrypted PEM file, such as openssl genpkey -algorithm ed25519 makes"
        raise UserError(f"{option} {given} holds no {kind} key", remedy) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey):
        raise UserError(f"{option} {given} is a key of another kind", "one of Ed25519")
    return key
