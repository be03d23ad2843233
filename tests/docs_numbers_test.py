"""Measured numbers in the prose of README, docs/choosing.md, docs/results and docs/research agree with the tables.

A number with a unit of measurement must be a rounded number of a table of its page, or appear on a results page that its paragraph links
to. Any other number is listed at the end of the page, with its derivation from numbers of the page or of a file, or with its source:

    <!-- numbers
    14 % = 100 * (1.2597 / 1.1039 - 1)
    4.5 BLEU = 38.2899 - 33.7992 in experiments/results/paper.jsonl
    57 s: README of torchft
    -->
"""

import functools
import pathlib
import re
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLAIMS = [ROOT / "README.md", ROOT / "docs" / "choosing.md"]  # pages whose tables have the numbers of other pages
PAGES = [*CLAIMS, *(path for name in ("results", "research") for path in sorted((ROOT / "docs" / name).glob("*.md")))]
NUMBER = r"(?<![\w.,])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e-?\d+)?"
# Units of prose, and the words in the header of a column of numbers with such a unit.
KINDS = {
    "×": "",
    "%": "",
    "ms": r"\bms\b|, s\b|seconds",
    "s": r"\bms\b|, s\b|seconds",
    "kB": "kB|MB",
    "MB": "kB|MB",
    "nats": "nats|loss",
    "BLEU": "BLEU",
    "points": "",
}
PREFIXED = ("ms", "s", "kB", "MB")  # units of which a table may have the one and prose the other
UNIT = "|".join(rf"{unit}\b" if unit.isalpha() else unit for unit in KINDS)
# One number, or several that share a unit, such as "3.2–5.4×", "−6 to +9 %" or "27, 28 and 29 %".
MEASURED = re.compile(rf"({NUMBER}(?:(?:\s?[–±]\s?|\s(?:to|and|or)\s|,\s(?:and\s)?)[+−±-]?{NUMBER})*)\s?({UNIT})(?!\s?\d)")
LISTED = re.compile(r"^<!-- numbers\n(.*?)^-->", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)[^)]*\)")
CONSTANTS = {"1", "100", "1000", "1000000"}  # of derivations


class Measured(NamedTuple):
    """A number of prose."""

    number: str
    unit: str

    def __str__(self) -> str:
        return f"{self.number}{'' if self.unit == '×' else ' '}{self.unit}"

    def is_rounded(self, value: float) -> bool:
        """Whether it is a value, rounded to its digits."""
        digits = len(self.number.partition(".")[2])
        return abs(value - number_of(self.number)) <= 0.5 * 10**-digits * (1 + 1e-9)


class Page(NamedTuple):
    """A page, divided into what is checked and what it is checked against."""

    prose: list[str]  # paragraphs, and rows of tables that link to results or repeat those of other pages
    cells: list[tuple[str, str]]  # (header, cell) of all other rows
    listed: list[tuple[Measured, str]]  # numbers and their derivations; "" for a number with a source
    text: str

    def values(self, unit):
        """Yield the numbers of tables that may have a unit."""
        for header, cell in self.cells:
            units = units_of(header)
            for number, percent in re.findall(rf"({NUMBER})(\s?%)?", cell):
                value = number_of(number)
                if unit in ("%", "points"):
                    yield from (value,) if percent else (100 * value,) if value <= 1 and not units else ()
                elif not percent and (unit in units or not units):
                    yield from (value, 1000 * value, value / 1000) if unit in PREFIXED else (value,)

    def has(self, number):
        """Whether a table has a number."""
        return any(map(number.is_rounded, self.values(number.unit)))

    def says(self, number):
        """Whether the prose has a number."""
        return any(number in measured(paragraph) for paragraph in self.prose)


def units_of(header):
    """Return the units that the numbers of a column may have in prose; none: any."""
    if re.search("speed-up|÷", header):
        return {"×"}
    return {unit for unit, words in KINDS.items() if words and re.search(words, header)}


def number_of(text):
    return float(text.replace(",", ""))


def measured(text):
    """Return the numbers with units of a text."""
    return [
        Measured(number, unit) for numbers, unit in MEASURED.findall(LINK.sub("]", text)) for number in re.findall(NUMBER, numbers)
    ]


@functools.cache
def read(path):
    text = path.read_text()
    listed = []
    for line in filter(None, "".join(LISTED.findall(text)).splitlines()):
        ((numbers, sign, rest),) = re.findall(r"^([^=:]*)([=:]) (.*)$", line)
        listed += [(number, rest if sign == "=" else "") for number in measured(numbers)]
    text = re.sub(r"^(```|~~~).*?^\1|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`|^    .*$", "", text, flags=re.MULTILINE)
    prose, cells, before = list[str](), list[tuple[str, str]](), ""
    for block in re.split(r"\n\n|\n(?=- )", text):
        if not block.lstrip().startswith("|"):
            prose.append(re.sub(r"\s+", " ", block))
            before = "".join(match[0] for match in LINK.finditer(block))
            continue
        header, *rows = block.strip().splitlines()
        for row in rows:
            if linked(path, row) or path in CLAIMS:
                prose.append(row if linked(path, row) else row + before)
            else:
                cells += zip(header.split("|"), row.split("|"))
    return Page(prose, [cell for cell in cells if "tuning" not in cell[0]], listed, text)


def linked(path, text):
    """Return the pages with results that a text links to."""
    targets = [(path.parent / target).resolve() for target in LINK.findall(text) if target.endswith(".md")]
    return [target for target in targets if target.parent.name in ("results", "research") and target != path and target.exists()]


def unaccounted(path):
    """Yield the numbers of a page that nothing accounts for, with their paragraphs."""
    page = read(path)
    listed = [number for number, _ in page.listed]
    for paragraph in page.prose:
        sources = [read(target) for target in linked(path, paragraph)]
        for number in measured(paragraph):
            if not (number in listed or page.has(number) or any(s.has(number) or s.says(number) for s in sources)):
                yield f"{number}: …{paragraph[:100]}"


def wrong(path):
    """Yield the numbers listed at the end of a page that its prose does not have, or whose derivation fails."""
    page = read(path)
    for number, derivation in page.listed:
        if not page.says(number):
            yield f"{number} is not in the prose"
        if derivation:
            formula, _, file = derivation.partition(" in ")
            source = re.sub(r"(?<=\d),(?=\d{3})", "", (ROOT / file).read_text() if file else page.text)
            if missing := [
                literal for literal in re.findall(NUMBER, formula) if literal not in CONSTANTS and literal not in source
            ]:
                yield f"{number} = {derivation}: {file or 'the page'} lacks {missing}"
            if not number.is_rounded(value := eval(formula, {"__builtins__": {}})):
                yield f"{number} = {derivation}: it is {value:.4g}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_numbers_in_prose_are_those_of_the_tables(path):
    assert [*unaccounted(path), *wrong(path)] == []


PAGE = """# Page

{prose}

| | ms per step | speed-up | MB | vs. all-reduce |
|:--|--:|--:|--:|--:|
| gossip | 1,561 | 2.14 | 23.6 | +4.2 % |

<!-- numbers
{listed}
-->
"""


@pytest.mark.parametrize(
    "prose, listed, fault",
    [
        ("It is 2.1× faster.", "", ""),
        ("It is 2.2× faster.", "", "2.2×"),
        ("A step takes 1.56 s and sends 24 MB.", "", ""),
        ("A step takes 1.65 s.", "", "1.65 s"),
        ("A step takes 2.14 s.", "", "2.14 s"),  # a ratio is no time
        ("Its loss is 2 to 4 % higher.", "", "2 %"),
        ("```\n--rate=7 s\n```\n\nSet `7 s`, in 7 rounds of 7 × 7 pixels.", "", ""),
        ("It saves 53 %.", "53 % = 100 * (1 - 1 / 2.14)", ""),
        ("It saves 54 %.", "54 % = 100 * (1 - 1 / 2.14)", "it is 53.27"),
        ("It saves 50 %.", "50 % = 100 * (1 - 1 / 2.0)", "the page lacks ['2.0']"),
        ("Its heartbeat is 5 s.", "5 s: a setting", ""),
        ("Its heartbeat is long.", "5 s: a setting", "5 s is not in the prose"),
        ("It is 1.78× [there](other.md).", "", ""),
        ("It is 1.79× [there](other.md).", "", "1.79×"),
        ("It is 1.78× there.", "", "1.78×"),
    ],
)
def test_a_wrong_number_is_seen(prose, listed, fault, tmp_path):
    path = tmp_path / "results" / "page.md"
    path.parent.mkdir()
    path.write_text(PAGE.format(prose=prose, listed=listed).replace("\n\n-->", "\n-->"))
    (path.parent / "other.md").write_text("It is 1.78× faster.")
    found = [*unaccounted(path), *wrong(path)]
    assert len(found) == bool(fault) and fault in "".join(found), found
