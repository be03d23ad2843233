"""List what a config can choose from: the kinds of parts, the parts of a kind, and the options of a part.

    python -m launch.parts
    python -m launch.parts mixer
    python -m launch.parts config              all other fields of a config, and their keys in a shorthand
    python -m launch.parts topology base_k

Everything is read from `decjax.registry`; an option is a field of the part's section in a config.
"""

from collections.abc import Iterable
import inspect
import re
import textwrap

import rich.table
import rich.text

from decjax import config, registry
from launch import command

WIDTH = 100
PARTNERS = {"task": ("model",), "model": ("task",)}  # kinds whose parts go with some of another kind


def kinds() -> list[rich.table.Table]:
    """Return a table of every kind with the names of its parts."""
    return [_table(("kind", "parts"), ((kind, ", ".join(registry.names(kind)) or "none") for kind in registry.KINDS))]


def fields() -> list[rich.table.Table]:
    """Return a table of the plain fields of a config with their shorthand keys, section by section."""
    keys = {(section, name): key for key, section, name, _ in config.shorthand_keys()}
    rows = [
        (f"{section}.{name}" if section else name, keys.get((section, name), ""), entry.type, _default(entry), entry.help)
        for section, declared in {"": config.RunSpec, **config.SECTIONS}.items()
        for name, entry in config.plain_fields(declared).items()
    ]
    return [_table(("field", "shorthand", "type", "default", "what it is"), rows)]


def parts(kind: str) -> list[rich.table.Table]:
    """Return a table of the parts of a kind: the first line of their docstrings, and their traits."""
    entries = [registry.part(kind, name) for name in registry.names(kind)]
    return [_table((kind, "what it is", "traits"), ((part.name, part.summary, "\n".join(_traits(part))) for part in entries))]


def part(kind: str, name: str, width: int = WIDTH) -> list:
    """Return the traits, docstring and options of a part."""
    chosen = registry.part(kind, name)
    options = [(option, entry.type, _default(entry)) for option, entry in chosen.options.items()]
    document = inspect.getdoc(chosen.factory) or "It has no description."
    inherited = [
        f"    {option}: {entry.help}" for option, entry in chosen.options.items() if entry.help and f"{option}: " not in document
    ]
    document = "\n".join([document, *(["", "Attributes of base classes:", *inherited] if inherited else [])])
    text = "\n".join([f"{kind} {name}", *_traits(chosen), "", wrapped(document, width)])
    return [rich.text.Text(text), _table(("option", "type", "default"), options) if options else "\nIt has no options."]


def wrapped(text: str, width: int) -> str:
    """Return a docstring with rewrapped paragraphs; indented lines are kept unless they, or others of an entry of `Args`, are too
    long."""

    def rejoined(entry: re.Match) -> str:
        fits = max(map(len, entry[0].splitlines())) <= width
        return entry[0] if fits else entry[1] + " ".join(entry[2].split())

    def filled(line: str) -> str:
        indent = len(line) - len(line.lstrip())
        return textwrap.fill(line, width, subsequent_indent=" " * (indent + 4) if indent else "", break_on_hyphens=False)

    text = re.sub(r"(?<=\S)\n(?=[^\s-])", " ", text)
    text = re.sub(r"^( +)(\w[\w, ]*: .*(?:\n\1 +\S.*)*)$", rejoined, text, flags=re.MULTILINE)
    return "\n".join(map(filled, text.splitlines()))


def _traits(part: registry.Entry) -> list[str]:
    """Return the traits of a part, as ["directed, static", "needs: a power of two workers"]."""
    paired = {f"{other}s": registry.partners(part.kind, part.name, other) for other in PARTNERS.get(part.kind, ())}
    traits = {name: value for name, value in {**part.traits, **paired}.items() if value not in (False, None, "", ())}
    plain = ", ".join(name for name, value in traits.items() if value is True)
    return [*filter(None, [plain]), *(f"{name}: {_shown(value)}" for name, value in traits.items() if value is not True)]


def _shown(value: object) -> str:
    """Format words with a space after each comma, where a line may break."""
    return re.sub(r",(?=\S)", ", ", ",".join(value) if isinstance(value, tuple) else str(value))


def _default(option: registry.Option) -> str:
    return "must be given" if option.default is inspect.Parameter.empty else str(option.default)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> rich.table.Table:
    made = command.table()
    for column in header:
        made.add_column(column, overflow="fold", no_wrap=column == header[0])
    for row in rows:
        made.add_row(*map(rich.text.Text, row))
    return made


def main(argv: list[str]) -> int:
    terminal = command.console(WIDTH)
    match argv:
        case ["config"]:
            shown = fields()
        case []:
            shown = kinds()
        case [kind]:
            shown = parts(kind)
        case [kind, name]:
            shown = part(kind, name, terminal.width)
        case _:
            command.refuse(f"unexpected argument {argv[2]!r}", "give a kind and a name, as in: topology base_k")
    for each in shown:
        terminal.print(each, markup=False)
    return 0


if __name__ == "__main__":
    command.run(main, errors=(ValueError,))
