"""A hub on this machine, in place of the real one."""

from __future__ import annotations

import pytest

from tests.data.fake_hub import running


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with tiny copies of every data set, and this machine's caches in a folder of the test's own."""
    import datasets
    from huggingface_hub import constants

    with running(tmp_path / "hub") as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
        yield served
