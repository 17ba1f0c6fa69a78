"""How long tests compute: each slow one has a mark, so that `make test` stays short.

A test that takes more than half a processor second is marked `slow`, or, if only some of its cases do, `slow_cases`
with the ids of these. `make test` lists tests above that limit, and fails for one that takes several times as long:
processor seconds of a shared machine vary too much to be exact.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

LIMIT = 0.5
#: Where a test fails, so that noise on a machine does not.
FAILS = 200 * LIMIT
_SECONDS = "processor seconds"


def spent() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the listed cases of a test as slow, before `-m` chooses."""
    for item in items:
        listed = {case for mark in item.iter_markers("slow_cases") for case in mark.args}
        if listed and item.callspec.id in listed:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    begin = spent()
    try:
        found = yield
    finally:
        item.user_properties.append((_SECONDS, spent() - begin))
    if item.user_properties[-1][1] > FAILS and item.get_closest_marker("slow") is None:
        pytest.fail(f"took {item.user_properties[-1][1]:.1f} processor seconds: mark it slow", pytrace=False)
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests above the limit that no mark announces."""
    over = {
        report.nodeid: seconds
        for report in terminalreporter.stats.get("passed", [])
        for name, seconds in report.user_properties
        if name == _SECONDS and seconds > LIMIT and "slow" not in report.keywords
    }
    for nodeid, seconds in sorted(over.items(), key=lambda one: -one[1])[:20]:
        terminalreporter.write_line(f"{seconds:.1f} processor seconds, and not marked slow: {nodeid}")
