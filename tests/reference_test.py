"""Pages of docs/reference show all exported names and registered parts, and their examples give the printed output."""

import doctest
import importlib
import importlib.util
import pathlib
import re
import sys

import pytest

from decjax import registry

REFERENCE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "reference"
KINDS = {"topology": "topology", "codecs": "codec", "gossip": "mixer", "reduce": "reducer"}  # package -> parts on its page
PACKAGES = (*KINDS, "costmodel", "mesh")


def shown(package: str) -> set[str]:
    """The last components of the paths given to mkdocstrings on a page, or the names in the headings that replace them."""
    page = (REFERENCE / f"{package}.md").read_text()
    paths = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    return paths | {name for heading in re.findall(r'heading: "([^"]+)"', page) for name in heading.split(", ")}


def shown_objects(package: str) -> list[object]:
    """Return the objects that these paths name, and the members that are listed below paths of modules."""
    page = (REFERENCE / f"{package}.md").read_text()
    paths = [path.rpartition(".") for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    listed = re.findall(r"^::: (\S+)\n +options: \{.*members: \[(.*)\]", page, re.MULTILINE)
    paths += [(module, ".", name) for module, names in listed for name in names.split(", ")]
    modules = {home: importlib.import_module(home) for home, _, _ in paths if home in sys.modules or importlib.util.find_spec(home)}
    return [getattr(modules[home], name, None) for home, _, name in paths if home in modules]


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_shown(package):
    module, objects = importlib.import_module(f"decjax.{package}"), shown_objects(package)
    missing = set(module.__all__) - shown(package)
    assert [name for name in missing if not any(getattr(module, name) is each for each in objects)] == []


@pytest.mark.parametrize("package, kind", KINDS.items())
def test_registered_parts_are_shown(package, kind):
    """Only decjax's: other tests may have registered their own parts."""
    parts = [registry.part(kind, name) for name in registry.names(kind)]
    own = [part for part in parts if part.factory.__module__.startswith("decjax.")]
    names, objects = shown(package) | shown("contrib"), shown_objects(package) + shown_objects("contrib")
    assert own and [part.name for part in own if part.name not in names and not any(part.factory is each for each in objects)] == []


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.stem)
def test_examples_run(page):
    results = doctest.testfile(str(page), module_relative=False)
    assert not results.failed and (results.attempted or page.stem in ("commands", "index", "measure"))  # measuring takes seconds
