"""Figures that are asked for, and whether they are met."""

from typing import NamedTuple

import rich.box
import rich.table


class Check(NamedTuple):
    """A figure that is asked for: met if it is at most (or at least) the bound; nan is not met."""

    what: str
    at: str  # under which condition
    figure: float
    bound: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound


def tabulate(found: list[Check]) -> rich.table.Table:
    """Every figure that is asked for."""
    table = rich.table.Table(box=rich.box.MARKDOWN)
    for column in ("figure", "at", "measured", "asked", "met"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for check in found:
        table.add_row(
            check.what,
            check.at,
            f"{check.figure:.2f}",
            f"{'≤' if check.at_most else '≥'} {check.bound:.2f}",
            "yes" if check.met else "NO",
        )
    return table
