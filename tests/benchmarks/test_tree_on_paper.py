"""The formulas of benchmarks/tree.py: the engine's tree, and a path that is added up by hand."""

from __future__ import annotations

import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.options.tree.tree import level_sizes


@given(st.integers(1, 10**6), st.integers(2, 200))
def test_the_tree_on_paper_is_the_engines(clients, fan_in):
    paper = tree.on_paper(clients, fan_in)
    assert list(paper.sizes) == level_sizes(clients, fan_in)
    assert paper.server == (paper.sizes[-1] if paper.sizes else clients) <= fan_in or not paper.sizes
    assert paper.inside == sum(paper.sizes)


def test_a_path_is_the_time_of_one_node_per_level():
    # 100 clients: nodes of 16 children in level 1, seven of which the server takes in; 10 bytes at 5 bytes per second.
    assert tree.path(100, 16, upload=10, rate=5.0, take=0.5) == pytest.approx((16 + 7) * 2.5)
    assert tree.path(100, 100, upload=10, rate=5.0, take=0.5) == pytest.approx(100 * 2.5)
    # 17 to 16 leaves two nodes, of 16 and of one.
    assert tree.path(17, 16, upload=10, rate=5.0, take=0.0) == pytest.approx((16 + 2) * 2)
    # What a node sends is twice as large: the server takes in seven of these.
    assert tree.path(100, 16, upload=10, rate=5.0, take=0.0, node=20) == pytest.approx(16 * 2 + 7 * 4)


def test_bytes_inside_are_those_of_each_nodes_own_samples():
    # 5 clients of 3 samples below a fan-in of 2: level 1 has 6, 6 and 3 samples, level 2 has 12 and, passed on, 3.
    rows = 4 * (tree.WIDTH + 1)
    sums = 4 * tree.WIDTH * tree.CLASSES
    assert tree.inside("fedran", 5, 15, 2) == (6 + 6 + 3 + 12 + 3) * rows + 5 * sums + 3 * 24
    assert tree.inside("afl", 5, 15, 2) == 5 * 4 * (tree.WIDTH**2 + tree.WIDTH * tree.CLASSES) + 3 * 8
    assert tree.inside("afl", 5, 15, 5) == 0


def test_fedrans_bytes_over_a_tree_are_the_formulas(tmp_path):
    """Clients of two samples send fewer directions than what their node makes of them."""
    n, fan_in = 80, 4
    size = tree.Size(K=40, T=1, C=tree.CLASSES, M=tree.WIDTH, n=n)
    record, _ = tree.run("fedran", size, tmp_path, "transport=tree", f"transport.fan_in={fan_in}")
    assert record["communication"]["up_max_bytes"] == tree.METHODS["fedran"].upload(n // 40)
    sent = sum(level["up_bytes"] for level in record["transport"]["levels"])
    assert sent == tree.inside("fedran", 40, n, fan_in)
