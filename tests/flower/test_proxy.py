"""The proxy before a node: it passes everything on, harms what it should, and what was captured is searched well."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import zipfile

import numpy as np
import pytest

from tests.flower.proxy import Proxy
from tests.flower.search import found_arrays, found_words, unpacked


@pytest.fixture
def echo():
    """A server that sends back what it gets; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    line, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=returned, args=(line,), daemon=True).start()

        def returned(line):
            with line:
                while piece := line.recv(1 << 16):
                    line.sendall(piece)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def echoed(port: int, content: bytes) -> bytes:
    """What comes back until the line ends, or there is as much as was sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(content)
        got = b""
        try:
            while len(got) < len(content) and (piece := line.recv(1 << 16)):
                got += piece
        except ConnectionError:  # cut
            pass
        return got


def test_everything_passes_and_is_captured(echo):
    proxy = Proxy(echo)
    sent = bytes(range(256)) * 1000
    assert echoed(proxy.port, sent) == sent
    assert proxy.up == proxy.down == sent
    assert not any(proxy.done.values())
    proxy.close()


@pytest.mark.parametrize(("kind", "comes"), [("cut", 0), ("halve", 250), ("flip", 1000)])
def test_a_piece_is_harmed(echo, kind, comes):
    proxy = Proxy(echo, rate=1.0, kinds=(kind,))
    sent = bytes(1000)
    got = echoed(proxy.port, sent)
    # Both directions are harmed: a half of a half comes back at most, and two bytes are others.
    assert len(got) <= comes
    assert proxy.done[kind] >= 1
    if kind == "flip":
        assert len(got) == comes
        assert 1 <= sum(map(bool, got)) <= 2
    proxy.close()


def test_harm_is_drawn_from_the_seed(echo):
    def harmed(seed):
        proxy = Proxy(echo, rate=1.0, seed=seed, kinds=("flip",))
        got = echoed(proxy.port, bytes(1000))
        proxy.close()
        return got

    assert harmed(1) == harmed(1) != harmed(2)


def test_open_connections_are_cut_and_new_ones_taken(echo):
    proxy = Proxy(echo)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as line:
        line.sendall(b"x")
        assert line.recv(1) == b"x"
        proxy.cut()
        with contextlib.suppress(ConnectionError):
            assert line.recv(1) == b""
    assert echoed(proxy.port, b"again") == b"again"
    proxy.close()
    with pytest.raises(OSError):
        echoed(proxy.port, b"closed")


def test_what_was_planted_is_found():
    rows = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config", "a path: /secret/site-0.npz " * 20)
    captured = b"POST /v1\r\n" + rows[1].astype(np.float64).tobytes() + packed.getvalue() + b"tail"
    assert found_words(captured, ["/secret/site-0.npz"]) == []
    assert found_words(unpacked(captured), ["/secret/site-0.npz", "elsewhere"]) == ["/secret/site-0.npz"]
    assert found_arrays(captured, rows) == [1]
    labels = np.array([[0, 1, 1, 0, 2, 1, 0, 2]])
    assert found_arrays(b"-" + labels.astype(np.int32).tobytes(), labels) == [0]
    assert found_arrays(b'{"labels": [0, 1, 1, 0, 2, 1, 0, 2]}', labels) == [0]
    assert found_arrays(b"nothing", labels) == []
