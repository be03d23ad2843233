"""What the README shows runs as it stands: its training loop learns, its commands and configs exist."""

import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from configs import lm
from configs import shorthand as arguments
from experiments import compression
from tests import commands
from tests.runs import trainer_of

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_loop_of_the_readme_learns():
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(4,))

    def batches(t):
        x = np.random.default_rng(t).normal(size=(8, 16, 4)).astype(np.float32)
        return x, (x @ truth).astype(np.float32)

    scope = {
        "loss": lambda params, batch: jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2),
        "batches": batches,
        "init_params": {"w": jnp.zeros(4)},
    }
    exec(code, scope)
    assert jax.device_count() == 8
    np.testing.assert_allclose(scope["average"]["w"], truth, atol=0.05)


def commands_of_the_readme():
    """(module, its flags) of all commands. What stands behind a lone -- is for the module that it starts, launch.train."""
    found = []
    for module, line in re.findall(r"python -m ((?:launch|experiments)[\w.]+)([^`\n#]*)", README.read_text()):
        own, _, passed = f"{line} ".partition(" -- ")
        found += [(module, own)] + ([("launch.train", passed)] if passed else [])
    return [(module, set(re.findall(r"--([\w.]+)", line))) for module, line in found]


@pytest.mark.parametrize("module", sorted({module for module, _ in commands_of_the_readme()}))
def test_commands_of_the_readme_have_the_flags_it_gives_them(module):
    given = set().union(*(flags for name, flags in commands_of_the_readme() if name == module))
    told = commands.run(module, "--helpfull")
    known = set(re.findall(r"^ +-\w,--(?:\[no\])?(\w+)|^ +--(?:\[no\])?(\w+)", told.stdout, re.MULTILINE))
    assert told.returncode == 0 and known, told.stderr
    fields = {name for name in given if name.startswith("config.")}
    assert given - fields <= {name for names in known for name in names}
    assert {name.removeprefix("config.") for name in fields} <= set(leaves(lm.get_config()))


def test_fields_in_the_prose_of_the_readme_exist():
    fields = set(re.findall(r"--config\.([\w.]+)", README.read_text()))
    shorthands = ("", "method=allreduce,reducer=powersgd,stages=2,backward=int8,forward=int8", "mixer=choco", "method=diloco")
    known = {field for text in shorthands for field in leaves(lm.get_config(text))}
    assert fields and fields <= known | {"SECTION.FIELD"}


def leaves(config, above=""):
    """Names of all fields, as data.path."""
    for name, value in config.items():
        yield from leaves(value, f"{above}{name}.") if isinstance(value, ml_collections.ConfigDict) else [above + name]


SHORTHANDS = sorted(
    {*re.findall(r"--config='?configs/lm\.py:([^\s']+)", README.read_text()), *(row.shorthand for row in compression.ROWS)}
)


@pytest.mark.parametrize("shorthand", SHORTHANDS)
def test_every_config_of_the_readme_and_of_the_compression_table_can_be_trained(shorthand):
    workers = re.search(r"workers=(\d+)", shorthand)
    many = workers and int(workers[1]) > jax.device_count()
    small = arguments.parse("smoke,steps=60" + (",simulate" if many else ""), lm.KEYS)
    config = lm.of_keys(arguments.parse(shorthand, lm.KEYS) | small)
    config.data.path = str(README)
    trainer_of(config)


def test_commands_of_the_readme_are_what_a_shell_takes():
    lines = [line.strip() for line in README.read_text().splitlines() if line.startswith("    ") and "python -m" in line]
    told = subprocess.run(["sh", "-n"], input="\n".join(lines), capture_output=True, text=True)
    assert len(lines) > 10 and told.returncode == 0, told.stderr


def test_every_dependency_is_explained():
    names = [
        re.split(r"[=;\[]", line)[0]
        for name in ("requirements.txt", "tests/requirements.txt", "tests/requirements-aot.txt")
        for line in (README.parent / name).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    table = README.read_text().split("## Dependencies")[1].split("## Sources")[0]
    assert [name for name in names if not re.search(rf"[| ,]{re.escape(name)}[ ,|]", table)] == []
