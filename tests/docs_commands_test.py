"""Commands, configs, files and names quoted by README, CONTRIBUTING.md and docs/: none is run, but each must be valid as written.

Commands appear in code blocks (shell or indented) and in backticks. Values with an ellipsis, a `$` or in capitals, such as
`--out=PROFILE.json`, are placeholders; everything else must exist.
"""

import functools
import importlib
import importlib.util
import pathlib
import re
import shlex
import subprocess

from absl import flags
import ml_collections
from ml_collections import config_flags
import pytest

from configs import cifar, lm, nodes, shorthand, translation
from decjax import config as parts
from decjax import costmodel, registry
from launch import cluster, config_file, members, plan_model
from tests import commands

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("", "sh", "bash", "console", "yaml", "docker")  # languages of code blocks with commands
DEVICES = 8
HELP = ("--help", "--helpfull")
OPERATORS = ("&&", "||", ";", "|", "&")
# Flags that take a shorthand -> the config file of the shorthand.
SHORTHANDS_OF = {"arg": "configs/gpt_optimus.py", "config_argument": "configs/lm.py"}
# Configs whose fields prose may name by path alone.
TYPICAL = ("", "method=allreduce,reducer=powersgd,stages=2,backward=int8,forward=int8", "mixer=choco", "method=diloco")


# -- What is quoted ---------------------------------------------------------------------------------------------------


def quoted(text: str) -> tuple[list[str], list[str]]:
    """Return (lines of shell blocks, code in backticks elsewhere); a trailing backslash continues a line."""
    blocks, prose, fence = [], [], None
    for line in text.splitlines():
        if found := re.match(r"\s*(`{3,}|~{3,})\s*([\w-]*)", line):
            fence = None if fence is not None else found[2]
        elif fence is not None:
            blocks += [line] * (fence in SHELLS)
        elif line.startswith("    ") and "`" not in line:
            blocks.append(line)
        else:
            prose.append(line)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return lines, [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", "\n".join(prose))]


def is_left_open(value: str) -> bool:
    """Whether a value is a placeholder, such as PROFILE.json, N or `…`, or a file written by tests/adding_a_part_test.py."""
    return "…" in value or "$" in value or value.startswith("mine/") or bool(re.match(r"[A-Z](?![a-z])", value))


def python_commands(line: str) -> list[tuple[str, list[str]]]:
    """Return (module, arguments) of each `python -m` in a line, including quoted ones."""
    words, found = shlex.split(line, comments=True), []
    for index, word in enumerate(words):
        if " -m " in word:
            found += python_commands(word)
        elif re.fullmatch(r"(.*/)?python[\d.]*", word) and words[index + 1 : index + 2] == ["-m"]:
            rest = words[index + 3 :]
            end = next((n for n, other in enumerate(rest) if other in OPERATORS or other[0] in "<>"), len(rest))
            found.append((words[index + 2], rest[:end]))
    return found


# -- What is wrong with it --------------------------------------------------------------------------------------------


def faults(text: str) -> list[str]:
    """Yield one line per invalid quote of a page."""
    lines, spans = quoted(text)
    found = []
    for line, is_whole in [(line, True) for line in lines] + [(span, False) for span in spans]:
        try:
            given = python_commands(line) if "python" in line and " -m " in line else []
        except ValueError as error:
            found.append(f"{line}: no shell takes it, {error}")
            continue
        found += [f"{line}: {fault}" for command in given for fault in command_faults(*command, is_whole)]
        if re.match(r"\s*make\s", line):
            found += [f"{line}: {fault}" for fault in make_faults(shlex.split(line, comments=True)[1:])]
    for span in spans:
        if not re.search(r"\s-", span):
            shorthands = re.findall(r"^configs/\w+\.py:\S+$", span)
            found += [fault for text in shorthands if not is_left_open(text) for fault in config_faults([f"--config={text}"])]
        found += [f"{span}: there is no {name}" for name in re.findall(r"\b(?:decjax|launch|experiments)(?:\.[A-Za-z_]\w*)+", span)
                  if not is_there(name)]  # fmt: skip
        if "python -m" not in span:
            found += [f"{span}: no config has {path}" for path in re.findall(r"--config\.([\w.]+)", span)
                      if not is_field(path) and not re.search(rf"^def .*, {path.rpartition('.')[2]}: ", text, re.MULTILINE)]  # fmt: skip
    named = re.findall(r"(?<![\w/.-])(?:decjax|launch|configs|examples|experiments|tests|docs)/[\w./-]*", text)
    return found + [f"there is no {path}" for path in sorted({*named}) if not (ROOT / path.rstrip(".,")).exists()]


def command_faults(module: str, arguments: list[str], is_whole: bool = True) -> list[str]:
    """Yield why `python -m module arguments` would be refused; `is_whole`: it is a complete command."""
    try:
        there = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        there = None
    if not there or module.partition(".")[0] not in ("launch", "experiments", "examples"):
        return [] if there else [f"there is no module {module}"]
    if arguments and arguments[-1] in HELP:
        return []
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, passed = arguments[:end], arguments[end + 1 :]
    values, words, found = parsed(module, own)
    known = commands.flags(module)
    if is_whole:
        found += [f"--{name} is missing" for name, flag in known.items() if flag.required and name not in values]
    found += [fault for name, value in values.items() if not is_left_open(value) for fault in value_faults(module, name, value)]
    found += word_faults(module, words, values)
    if module == "launch.sweep":
        found += sweep_faults(values, passed, is_whole)
    elif passed and module not in ("launch.local", "launch.cluster", "launch.slurm"):
        found.append(f"{module} takes nothing behind --")
    elif passed or (is_whole and module in ("launch.local", "launch.slurm")) or words[:1] == ["run"]:
        found += command_faults(values.get("module", "launch.train"), passed, is_whole)
    if "config" in known and module != "launch.sweep" and not is_left_open(values.get("config", "…")):
        found += config_faults(own, values.get("compressed", ""))
    return found


def parsed(module: str, arguments: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return (flag values, positional arguments, errors); config fields are left out."""
    known, values, words, found = commands.flags(module), {}, [], []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            words.append(argument)
        elif re.match(r"(no)?config\.", name) and "config" in known:
            continue
        elif name not in known and not (name.removeprefix("no") in known and known[name.removeprefix("no")].boolean):
            found.append(f"{module} has no flag --{name}")
        elif name in known and not known[name].boolean and not equals:
            found.append(f"--{name} has no value")
        else:
            values[name] = value
            if equals and not is_left_open(value) and known[name].parser and not known[name].boolean:
                try:
                    known[name].parser.parse(value)
                except ValueError as error:
                    found.append(f"--{name}={value}: {error}")
    return values, words, found


def value_faults(module: str, name: str, value: str) -> list[str]:
    """Return what is wrong with the value of a flag that names something in the project."""
    try:
        if name == "cluster" and value.endswith(".json") and "/" in value:
            costmodel.load(ROOT / value)
        elif name == "model" and plan_model.is_config(value):
            return config_faults([f"--config={value}"])
        elif name == "model":
            plan_model.parse(value, plan_model.Sizes if "depth=" in value else plan_model.Numbers)
        elif name in SHORTHANDS_OF and module.startswith("experiments."):
            return config_faults([f"--config={SHORTHANDS_OF[name]}:{value}"])
        elif name == "codec":
            registry.make("codec", value)
        elif name == "topologies" and value != "all":
            for topology in value.split(","):
                registry.part("topology", topology)
    except (OSError, ValueError) as error:
        return [f"--{name}={value}: {error}"]
    return []


def word_faults(module: str, words: list[str], values: dict[str, str]) -> list[str]:
    """Return what is wrong with positional arguments."""
    if module == "experiments.compare" or any(map(is_left_open, words)) or any("[" in word for word in words):
        return []
    if module == "launch.parts":
        try:
            named = registry.names(words[0]) if words not in ([], ["config"]) else ()
            return [f"{words[0]} has no {word}" for word in words[1:] if word not in named]
        except ValueError as error:
            return [str(error)]
    if module == "launch.cluster" and words:
        unknown = [] if len(words) == 1 and words[0] in cluster._VERBS else [f"{' '.join(words)} is no verb of launch.cluster"]
        others = [name for name in values if name in cluster._VERBS_OF and words[0] not in cluster._VERBS_OF[name]]
        return unknown + [f"--{name} is no option of {words[0]}" for name in others]
    return [f"{module} takes no argument {word!r}" for word in words]


def sweep_faults(values: dict[str, str], passed: list[str], is_whole: bool) -> list[str]:
    """Return what is wrong with the runs of a sweep, each with its config."""
    config, text = values.get("config", "…"), values.get("sweep")
    if is_left_open(config) or is_left_open(text or "") or not (text or is_whole):
        return []
    try:
        path, _, argument = config.partition(":")
        module = config_file.load_module(str(ROOT / path))
        swept = members.parse_sweep(text or members.sweep_of(module, path, argument))
        members.check_apart(config, swept, passed)
        found = members.expand(config, swept, getattr(module, "KEYS", config_file.ANY_KEY), pathlib.Path("sweep"), passed)
    except Exception as error:  # whatever the command would report
        return [str(error)]
    return [fault for member in found for fault in config_faults([a for a in member.arguments if "workdir" not in a])]


def make_faults(words: list[str]) -> list[str]:
    """Return what is wrong with targets and variables of `make`."""
    makefile = (ROOT / "Makefile").read_text()
    known = {*re.findall(r"^([\w-]+)(?= ?[?:]?=|:)", makefile, re.MULTILINE)}
    return [f"the Makefile has no {word}" for word in words if word.partition("=")[0] not in known and not is_left_open(word)]


# -- Configs ----------------------------------------------------------------------------------------------------------


def config_faults(arguments: list[str], compressed: str = "") -> list[str]:
    """Return why a run with these config flags would be refused, before devices are looked up."""
    fields = [argument for argument in arguments if re.match(r"--(no)?config[.=]", argument) and "SECTION.FIELD" not in argument]
    found = list(_config_faults(tuple(fields)))
    if compressed and not is_left_open(compressed) and not found:
        file, colon, given = fields[0].partition(":")
        found += _config_faults((f"{file}:{given}{',' * bool(colon)}{compressed}", *fields[1:]))
    return found


@functools.cache
def _config_faults(fields: tuple[str, ...]) -> tuple[str, ...]:
    argv = ["launch.train", *(re.sub(r"^--config=(?=\w)", f"--config={ROOT}/", field) for field in fields)]
    if complaint := config_file.complaint(argv):
        return (complaint,)
    holder = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, flag_values=holder, sys_argv=argv)
    try:
        holder(argv)
        parts.resolve(holder.config, DEVICES)
    except Exception as error:  # whatever the command would report
        return (f"{' '.join(fields)}: {error}",)
    return ()


@functools.cache
def _typical_fields() -> frozenset[str]:
    def paths(config, above=""):
        for name, value in config.items():
            yield above + name
            if isinstance(value, ml_collections.ConfigDict):
                yield from paths(value, f"{above}{name}.")

    usual = [lm.get_config(shorthand) for shorthand in TYPICAL] + [file.get_config() for file in (translation, cifar, nodes)]
    return frozenset(path for config in usual for path in paths(config))


def is_field(path: str) -> bool:
    """Whether one of the usual configs has the field; CAPITALS are placeholders."""
    return is_left_open(path) or path.rstrip(".") in _typical_fields()


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    owner, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(owner), attribute) or bool(importlib.util.find_spec(name))
    except ImportError:
        return False


# -- Tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_quotes_is_so(page):
    assert faults(page.read_text()) == []


def test_commands_of_code_blocks_are_what_a_shell_takes():
    lines = [line.strip() for page in PAGES for line in quoted(page.read_text())[0] if " -m " in line]
    told = subprocess.run(["sh", "-n"], input="\n".join(lines), capture_output=True, text=True)
    assert len(lines) > 10 and told.returncode == 0, told.stderr


def test_the_jobset_has_a_command_that_trains():
    lines = (ROOT / "examples" / "jobset.yaml").read_text().replace("\\\n", " ").splitlines()
    (started,) = [command for line in lines if " -m " in line for command in python_commands(line)]
    assert command_faults(*started) == []


def test_every_command_is_told():
    """Every module that is a command is documented in docs/reference/commands.md."""
    told = (ROOT / "docs/reference/commands.md").read_text()
    modules = [path.relative_to(ROOT) for top in ("launch", "experiments") for path in sorted((ROOT / top).rglob("*.py"))]
    starts = [".".join(path.with_suffix("").parts) for path in modules if '__name__ == "__main__"' in (ROOT / path).read_text()]
    others = ("experiments.bench.cluster.", "_torch")
    assert [name for name in starts if not any(other in name for other in others) and f"python -m {name}" not in told] == []


def docs(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python.*?\n(.*?)```", docs(name), re.DOTALL)


def test_the_config_file_of_the_docs_is_one(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(python_blocks("guides/configs.md")[0])
    assert config_faults([f"--config={path}:topology=ring", "--config.model.width=64"]) == []
    assert sweep_faults({"config": str(path)}, [], True) == []
    path.write_text(path.read_text().replace("width=128", "widht=128"))
    assert config_faults([f"--config={path}"]) != []


def test_python_of_the_docs_runs():
    scope = {"config": lm.get_config("optimizer=sgdm")}
    exec(python_blocks("guides/configs.md")[1], scope)
    assert scope["config"].optimizer.momentum == 0.95
    exec(python_blocks("guides/compression.md")[0], scope)
    assert scope["reducer"].phase(29) != scope["reducer"].phase(28)


@pytest.mark.parametrize("kind", ["method", "mixer", "reducer", "codec"])
def test_every_part_that_makes_messages_is_documented(kind):
    names = [name for name in registry.names(kind) if registry.part(kind, name).factory.__module__.startswith("decjax.")]
    pages = docs("catalog.md") + docs("guides/compression.md")
    assert names and [name for name in names if not re.search(rf"[`,]({kind}=)?{name}\b", pages)] == []


def test_every_shorthand_of_the_catalog_is_a_config():
    shorthands = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", docs("catalog.md"), re.MULTILINE)
    assert len(shorthands) > 40
    assert [fault for shorthand in shorthands for fault in config_faults([f"--config=configs/lm.py:{shorthand}"])] == []


def test_every_key_of_the_shorthand_is_told():
    told = docs("guides/configs.md") + docs("guides/pipelines.md")
    assert [key for key in shorthand.keys(lm.OWN) if not re.search(rf"`{key}[=`]", told)] == []


GOOD = [
    "python -m launch.train --config=configs/lm.py:workers=4,codec=int8 --workdir=runs/a --config.log_every=5  # as often",
    "srun -N4 python -m launch.train --config=configs/digits.py:norm=group --workdir=runs/a --config.data.partition='dirichlet(alpha=0.1)'",
    "python -m launch.local --num_processes=2 -- --config=configs/lm.py:smoke --workdir=runs/a --noconfig.simulate",
    "python -m launch.cluster run --hosts=2 --rate=1mbit --module=launch.calibrate -- --config=configs/lm.py --out=a.json",
    "python -m launch.sweep --config=configs/lm.py --sweep='topology=ring,torus(shape=(2,4));seed=0,1' --workdir=sweeps/a",
    "python -m launch.calibrate --config=configs/lm.py --compressed=mixer=choco,codec=int4 --out=PROFILE.json",
    "python -m launch.plan --cluster=configs/clusters/box_200mbit.json --model=params=65e6,forward_s=1,backward_s=2 --every=3",
    "python -m experiments.compare runs/a sweeps/* --markdown >table.md",
    "sh -c 'exec python -m launch.train --coordinator=auto --config=configs/lm.py --workdir=$WORKDIR'",
    "python -m launch.parts topology base_k && make test PYTHON=python3.12",
    "JAX_NUM_CPU_DEVICES=4 python -m examples.flax_after --steps=100 && python -m examples.own_loop",
]


@pytest.mark.parametrize("line", GOOD)
def test_a_good_command_passes(line):
    assert faults(f"Text.\n\n    {line}\n") == []


BAD = [
    ("python -m launch.trian --config=configs/lm.py --workdir=a", "there is no module launch.trian"),
    ("python -m launch.train --config=configs/lm.py", "--workdir is missing"),
    ("python -m launch.train --config=configs/lm.py --workdir=a --rounds=3", "launch.train has no flag --rounds"),
    ("python -m launch.train --config=configs/nope.py --workdir=a", "No such file"),
    ("python -m launch.train --config=configs/lm.py:topology=moebius --workdir=a", "'moebius'"),
    ("python -m launch.train --config=configs/lm.py:mixer=chocolate --workdir=a", "'chocolate'"),
    ("python -m launch.train --config=configs/lm.py:workers=12,topology=hypercube --workdir=a", "power of two"),
    ("python -m launch.train --config=configs/lm.py --workdir=a --config.mixer.gamma=1", "config.mixer.gamma is unknown"),
    ("python -m launch.train --config=configs/lm.py --workdir=a --config.steps=many", "many"),
    ("python -m launch.train --config='configs/lm.py:codec=int8(block=7)' --workdir=a", "block=7"),
    ("python -m launch.local --num_processes=two -- --config=configs/lm.py --workdir=a", "--num_processes=two"),
    ("python -m launch.local --num_processes=2 -- --config=configs/lm.py --out=a", "launch.train has no flag --out"),
    ("python -m launch.cluster rise --hosts=2", "rise is no verb"),
    ("python -m launch.cluster down --rate=1mbit", "--rate is no option of down"),
    ("python -m launch.sweep --config=configs/lm.py --workdir=a --sweep='topology=ring,moebius'", "'moebius'"),
    ("python -m launch.sweep --config=configs/lm.py --workdir=a --sweep='speed=1'", "speed"),
    ("python -m launch.sweep --config=configs/lm.py --workdir=a --sweep='seed'", "'seed' is not key=value"),
    ("python -m launch.sweep --config=configs/lm.py:workers=4 --workdir=a --sweep='workers=2,4'", "workers is set by the sweep"),
    ("python -m launch.plan --cluster=configs/clusters/moon.json", "moon.json"),
    ("python -m launch.plan --cluster=PROFILE.json --model=parms=1", "'parms' is unknown"),
    ("python -m launch.plan_layouts --cluster=PROFILE.json --remat=some", "--remat=some"),
    ("python -m launch.calibrate --config=configs/lm.py --compressed=mixer=chocolate --out=a.json", "'chocolate'"),
    ("python -m launch.parts mixer chocolate", "mixer has no chocolate"),
    ("python -m launch.topologies 12 --workers=12", "takes no argument '12'"),
    ("python -m experiments.bench.optimus_step --arg=size=9b", "size='9b'"),
    ("python -m launch.train --config='configs/lm.py --workdir=a", "No closing quotation"),
    (
        "python -m launch.local --num_processes=2 --module=examples.flax_after -- --depth=3",
        "examples.flax_after has no flag --depth",
    ),
    ("python -m examples.own_lop", "there is no module examples.own_lop"),
    ("make toast", "the Makefile has no toast"),
]


@pytest.mark.parametrize("line, fault", BAD)
def test_a_bad_command_is_seen(line, fault):
    for text in (f"Text.\n\n    {line}\n", f"```bash\n{line.replace(' --', ' ' + chr(92) + chr(10) + '  --', 1)}\n```\n"):
        found = faults(text)
        assert found and any(fault in each for each in found), found


@pytest.mark.parametrize(
    "text, fault",
    [
        ("See `configs/lm.py:topology=moebius`.", "'moebius'"),
        ("See `decjax/nope.py`.", "there is no decjax/nope.py"),
        ("See `launch.trian`.", "there is no launch.trian"),
        ("See `decjax.codecs.nope()`.", "there is no decjax.codecs.nope"),
        ("Set `--config.mixer.gama=1`.", "no config has mixer.gama"),
        ("Run `python -m launch.plan\n--rounds=3`.", "launch.plan has no flag --rounds"),
    ],
)
def test_a_bad_name_in_prose_is_seen(text, fault):
    assert any(fault in each for each in faults(text))


def test_what_the_reader_chooses_and_what_is_no_command_passes():
    text = "`python -m launch.parts [KIND [NAME]]`, `--config.SECTION.FIELD=VALUE`\n\n```text\npython -m launch.nope --x\n```\n"
    assert faults(text) == []
