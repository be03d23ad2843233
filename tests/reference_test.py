"""Pages of docs/reference: they show all exported names and registered parts, and their examples give what they say."""

import doctest
import importlib
import pathlib
import re

import pytest

from decjax import registry

REFERENCE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "reference"
KINDS = {"topology": "topology", "codecs": "codec", "gossip": "mixer", "reduce": "reducer"}  # package -> parts on its page
PACKAGES = (*KINDS, "costmodel", "mesh")


def shown(package: str) -> set[str]:
    """Last parts of the paths that mkdocstrings is given on a page, or the names in the headings that replace them."""
    page = (REFERENCE / f"{package}.md").read_text()
    paths = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    return paths | {name for heading in re.findall(r'heading: "([^"]+)"', page) for name in heading.split(", ")}


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_shown(package):
    assert set(importlib.import_module(f"decjax.{package}").__all__) - shown(package) == set()


@pytest.mark.parametrize("package, kind", KINDS.items())
def test_registered_parts_are_shown(package, kind):
    """Those of decjax: other tests may have registered parts of their own."""
    own = {name for name in registry.names(kind) if registry.part(kind, name).factory.__module__.startswith("decjax.")}
    factories = {registry.part(kind, name).factory.__name__ for name in own} if kind == "reducer" else own
    assert factories and factories - shown(package) == set()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.stem)
def test_examples_run(page):
    results = doctest.testfile(str(page), module_relative=False)
    assert not results.failed and (results.attempted or page.stem in ("index", "measure"))  # Measuring takes devices and seconds.
