"""Signatures of runs: a signed record that is edited, sealed again or not, is refused."""

from __future__ import annotations

import base64
import json
import shutil
import sys

import pytest

from fcl_bench.errors import UserError
from fcl_bench.results.signing import SIGNATURE, public_key, sign, signer
from tests.results.forging import resealed
from tests.small_runs import run_in

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("signed"), "method=afl", "tasks=1", "clients=2").folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def pem(key, private=True, password=None):
    if not private:
        return key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)


@pytest.fixture
def key(tmp_path):
    """A key as `openssl genpkey -algorithm ed25519` makes it, and its file."""
    made = ed25519.Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(pem(made))
    return made, str(tmp_path / "key.pem")


def test_whose_a_signature_is(run, key):
    made, file = key
    assert signer(run) is None
    raw = made.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    assert sign(run, file) == signer(run) == base64.b64encode(raw).decode()


def test_the_signature_is_that_of_rfc_8032_over_the_records_bytes(run, key):
    """The oracle: Ed25519 is deterministic, so the same key makes the same signature elsewhere."""
    made, file = key
    sign(run, file)
    written = json.loads((run / SIGNATURE).read_text())
    expected = made.sign(b"fcl-bench run record\n" + (run / "run.json").read_bytes())
    assert base64.b64decode(written["signature"]) == expected


@pytest.mark.parametrize(
    "edit",
    [
        lambda run: resealed(run, {"metrics.A_avg": 100.0}),
        lambda run: resealed(run, config={"threads": 2}),
        lambda run: (run / "run.json").write_text((run / "run.json").read_text() + "\n"),
        lambda run: (run / SIGNATURE).write_text("{}"),
        lambda run: (run / SIGNATURE).write_text("[1]"),
        lambda run: (run / SIGNATURE).write_bytes(b"\xff"),
        lambda run: (run / SIGNATURE).write_text(json.dumps({"public_key": "AAAA", "signature": "AAAA"})),
    ],
)
def test_what_was_edited_after_it_was_signed_is_refused(run, key, edit):
    sign(run, key[1])
    edit(run)
    with pytest.raises(UserError, match=r"run\.sig is no signature of this run\.json"):
        signer(run)


def test_a_signature_under_another_name_is_refused(run, key):
    """Somebody puts their own public key beside the signature of another."""
    sign(run, key[1])
    written = json.loads((run / SIGNATURE).read_text())
    raw = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    (run / SIGNATURE).write_text(json.dumps({**written, "public_key": base64.b64encode(raw).decode()}))
    with pytest.raises(UserError, match="no signature of this"):
        signer(run)


def test_a_signature_of_another_run_is_refused(run, finished, key, tmp_path):
    other = shutil.copytree(finished, tmp_path / "other")
    resealed(other, {"environment.git_commit": "1" * 40})
    sign(other, key[1])
    shutil.copy(other / SIGNATURE, run / SIGNATURE)
    with pytest.raises(UserError, match="no signature of this"):
        signer(run)


def test_a_damaged_run_is_not_signed(run, key):
    (run / "tasks.csv").write_text("task\n")
    with pytest.raises(UserError, match=r"damaged: tasks\.csv"):
        sign(run, key[1])
    assert signer(run) is None


@pytest.mark.parametrize("content", [b"", b"no key", None, "public", "locked"])
def test_what_is_no_private_key_is_refused_in_one_line(run, key, tmp_path, content):
    made, _ = key
    contents = {"public": pem(made, private=False), "locked": pem(made, password=b"secret")}
    if content is not None:
        (tmp_path / "bad.pem").write_bytes(contents.get(content, content))
    with pytest.raises(UserError, match="holds no private key .*openssl genpkey"):
        sign(run, str(tmp_path / "bad.pem"))


@pytest.mark.slow
def test_a_key_of_another_kind_is_refused(run, tmp_path):
    (tmp_path / "rsa.pem").write_bytes(pem(rsa.generate_private_key(65537, 2048)))
    with pytest.raises(UserError, match=r"another kind \(one of Ed25519\)"):
        sign(run, str(tmp_path / "rsa.pem"))


def test_a_public_key_is_given_as_printed_or_as_a_file(run, key, tmp_path):
    made, file = key
    printed = sign(run, file)
    (tmp_path / "public.pem").write_bytes(pem(made, private=False))
    assert public_key(printed) == public_key(str(tmp_path / "public.pem")) == printed
    with pytest.raises(UserError, match="holds no public key"):
        public_key(file)


def test_without_the_package_one_line_says_what_to_install(run, key, monkeypatch):
    sign(run, key[1])
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(UserError, match=r"need the package cryptography .*pip install '\.\[secure\]'"):
        signer(run)
