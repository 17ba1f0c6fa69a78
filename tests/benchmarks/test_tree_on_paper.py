"""The formulas of benchmarks/tree.py: the engine's tree, and a path that is added up by hand."""

from __future__ import annotations

import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.engine.tree import level_sizes


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
