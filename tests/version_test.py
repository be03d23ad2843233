"""The version of the package, from its source tree or from an installation."""

import importlib.metadata
import tomllib

import pytest

import decjax
from tests.commands import ROOT


def test_a_source_tree_says_its_own():
    assert decjax.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize(
    "stranger", ['[project]\nname = "other"\nversion = "9.9"', '[project]\nname = "other"', "[tool.ruff]", None]
)
def test_a_stranger_s_file_beside_the_installed_package_says_nothing(stranger, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"decjax": "1.2.3"}.get)
    if stranger is not None:
        (tmp_path / "pyproject.toml").write_text(stranger)
    assert decjax._version(tmp_path) == "1.2.3"
