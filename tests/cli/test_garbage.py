"""The garbage collector rests during imports, and only then."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from fcl_bench.cli import garbage
from fcl_bench.cli.garbage import first_job_begins, resting_collector


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_in_the_block_and_as_before_behind_it(was_on):
    set_to = (gc.disable, gc.enable)
    set_to[was_on]()
    try:
        with resting_collector():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
        with pytest.raises(ImportError), resting_collector():
            raise ImportError
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_before_the_first_job_what_was_imported_is_set_aside(monkeypatch):
    monkeypatch.setattr(garbage._Start, "over", False)
    with resting_collector():
        made = Cycle()
    assert gc.get_freeze_count() > 0
    assert not any(one is made for one in gc.get_objects())
    gc.unfreeze()


def test_garbage_that_a_job_leaves_is_still_collected(monkeypatch):
    """The second job of a sweep must not keep what the first one left."""
    monkeypatch.setattr(garbage._Start, "over", False)
    first_job_begins()
    cycle = Cycle()
    gone = weakref.ref(cycle)
    del cycle
    with resting_collector():
        pass
    gc.collect()
    assert gone() is None


def test_a_run_starts_without_looking_for_garbage_among_its_imports(feature_file, tmp_path):
    arguments = ["data=features", f"data.path={feature_file}", f"out={tmp_path}", "method=afl", "tasks=2"]
    program = (
        "import gc, sys\n"
        "from fcl_bench.cli import app\n"
        "full = []\n"
        "gc.callbacks.append(lambda phase, info: full.append(0) if info['generation'] == 2 else 0)\n"
        "begins = app.first_job_begins\n"
        "def at_start():\n"
        "    assert 'torch' in sys.modules\n"
        "    assert len(full) <= 2, len(full)  # two calls each\n"
        "    begins()\n"
        "    assert gc.get_freeze_count() > 100_000\n"
        "    print('set aside')\n"
        "app.first_job_begins = at_start\n"
        f"sys.argv = ['fcl-bench', *{arguments!r}]\n"
        "sys.exit(app.main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set aside" in done.stdout
