"""What the node's processes say to each other, what is typed at a node, and what it saves on its disk."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch

from fcl_bench.engine.checkpoint import ClientStore
from fcl_bench.errors import UserError
from fcl_bench.flower import frames, worker
from fcl_bench.flower.node import NodeArguments, parsed
from fcl_bench.flower.site import changed


def pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


@pytest.mark.parametrize("blobs", [[], [b""], [b"abc", b"", os.urandom(3_000_000)]])
def test_a_frame_comes_back(blobs):
    here, there = pair()
    with here, there:
        thread = threading.Thread(target=frames.send, args=(here, {"do": "push", "node": "7"}, blobs))
        thread.start()
        assert frames.receive(there) == ({"do": "push", "node": "7"}, blobs)
        thread.join()
        here.shutdown(socket.SHUT_WR)
        assert frames.receive(there) is None


@pytest.mark.parametrize(
    "said",
    [
        b"\x05\x00\x00",
        b"\x05" + bytes(7) + b"{}",
        b"\x02" + bytes(7) + b"{}",
        b"\x04" + bytes(7) + b"\x80\x04N.",  # a pickle
        b"\xff" * 8 + b"{}",
        b'\x1d\x00\x00\x00\x00\x00\x00\x00{"header": {}, "lengths":[9]}abc',
    ],
)
def test_what_is_no_frame_is_refused(said):
    here, there = pair()
    with here, there:
        here.sendall(said)
        here.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            frames.receive(there)


def test_only_this_user_may_connect_to_a_socket(tmp_path):
    path = tmp_path / "s"
    with frames.listener(path) as listener:
        assert path.stat().st_mode & 0o777 == 0o600
        with frames.connected(str(path)) as line, listener.accept()[0] as other:
            frames.send(line, {"a": 1})
            assert frames.receive(other).header == {"a": 1}
    with pytest.raises(OSError):
        frames.connected(str(path))


def test_only_the_saves_that_may_be_asked_for_stay_and_only_this_user_may_read_them(tmp_path):
    """They may hold raw samples."""
    stores = {client: ClientStore(tmp_path / "run", "run", f"client-{client}") for client in (1, 11)}
    state = {"half": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0, 2)}
    for round_ in range(4):
        named = {**state, "round": torch.tensor(round_)}
        stores[1].save(f"round-{round_}", [1], {f"1.{name}": value for name, value in named.items()})
    stores[11].save("round-0", [11], {"11.x": torch.ones(1)})
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    stores[1].prune(["round-1", None, "round-3"])
    saves = [path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").glob("*/*")]
    assert sorted(saves) == ["round-0/client-11", "round-1/client-1", "round-3/client-1"]
    found = stores[1].restore("round-3", [1])
    assert int(found["1.round"]) == 3
    assert found["1.half"].dtype == torch.bfloat16
    assert found["1.none"].shape == (0, 2)
    with pytest.raises(UserError, match="lacks what 1 clients stored"):
        stores[1].restore("round-2", [1])
    stores[1].delete()
    assert not (tmp_path / "run").exists()


def test_what_a_worker_that_was_killed_had_begun_to_write_goes(tmp_path):
    """It may hold raw samples, and stayed until the run was complete."""
    half = tmp_path / "round-0" / "client-1" / f".tensors-1-{'0' * 32}.safetensors"
    half.parent.mkdir(parents=True)
    half.touch()
    ClientStore(tmp_path, "run", "client-1").save("round-0", [1], {"1.x": torch.ones(1)})
    assert sorted(path.name for path in half.parent.iterdir()) == ["state.json", "tensors-1.safetensors"]


def test_what_is_typed_at_a_node():
    found = parsed(["link=lab.example:8000", "clients=[6,0,3]", "data.path=/own.npz", "cache.enabled=false", "out=o"])
    changes = {"data.path": "/own.npz", "cache.enabled": False}
    assert found == NodeArguments([0, 3, 6], "lab.example:8000", "o", None, None, changes)
    assert parsed(["clients=3"]) == NodeArguments([3])


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ([], "clients is not given"),
        (["clients=a"], "clients=a names no clients"),
        (["clients=1,1"], "names a client twice"),
        (["clients=-1"], "clients=-1 names no clients"),
        (["clients=1", "link=lab"], "link=lab is no host:port"),
        (["clients=1", "link=lab:99999"], "link=lab:99999 is no host:port"),
        (["clients=1", "--fast"], "--fast is no KEY=VALUE"),
        (["clients=1", "data.path=[a"], "has no value that YAML knows"),
    ],
)
def test_what_cannot_be_typed_at_a_node_is_told_in_one_line(typed, told):
    with pytest.raises(UserError, match=told) as error:
        parsed(typed)
    assert "\n" not in str(error.value)


def test_a_node_changes_keys_that_there_are():
    config = {"data": {"path": None, "name": "x"}, "seed": 0}
    assert changed(config, {"data.path": "f", "seed": 3}) == {"data": {"path": "f", "name": "x"}, "seed": 3}
    assert config["data"]["path"] is None
    for name in ("data.paht", "seed.path", "nothing"):
        with pytest.raises(UserError, match=f"{name} is no key of this run"):
            changed(config, {name: 1})


def test_a_turn_that_takes_too_long_ends_the_worker(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(worker.os, "_exit", lambda code: ended.set())
    with worker._no_longer_than(0.05):
        assert ended.wait(5)
    ended.clear()
    with worker._no_longer_than(0.05):
        pass
    assert not ended.wait(0.2)


def test_the_relays_are_in_the_package_and_import_no_torch():
    bundle = Path(frames.__file__).parent / "bundle"
    assert sorted(path.name for path in bundle.glob("*.*")) == [
        "fcl_relay_client.py",
        "fcl_relay_server.py",
        "pyproject.toml",
    ]
    text = "".join(path.read_text() for path in bundle.glob("*.py"))
    assert "torch" not in text
    assert "pickle" not in text
