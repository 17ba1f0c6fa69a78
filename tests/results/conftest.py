"""Runs of these tests are of a known revision, whatever the state of the checkout that they are made in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fcl_bench import environment


@pytest.fixture(scope="session", autouse=True)
def a_known_revision() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "git_commit", lambda: "0" * 40)
        yield
