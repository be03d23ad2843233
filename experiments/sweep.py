"""Studies of a few settings, each of which is trained with several seeds."""

from collections.abc import Callable, Iterable, Mapping
import itertools
from typing import TypeVarTuple

from absl import flags

from experiments import script, trials

Setting = TypeVarTuple("Setting")
ERRORS = (trials.Broken, OSError)
flags.disclaim_key_flags()  # as in `script`


def define(seeds: int = 3) -> None:
    """Define the flags of every study."""
    script.define("out", "pages")
    flags.DEFINE_integer("seeds", seeds, "Runs of each setting, with seeds 0, 1, ….", lower_bound=1)


def train(
    name: str,
    settings: Iterable[tuple[*Setting]],
    config: Callable[[*Setting, int], tuple[str, Mapping[str, object]]],
    may_diverge: bool = False,
) -> dict[tuple[*Setting], list[trials.Trial]]:
    """Return the runs of each setting, one for each seed; none for a setting of which a run diverged.

    Args:
        name: of the study's table.
        settings: what distinguishes the runs.
        config: returns the config, with its shorthand, and the fields of a setting and a seed.
        may_diverge: whether a run may diverge. Otherwise one that does ends the command.
    """
    out = script.folder()
    script.check_tables(name)
    runs: dict[tuple[*Setting], list[trials.Trial]] = {}
    for setting in settings:
        runs[setting] = []
        for seed in range(flags.FLAGS.seeds):
            file, fields = config(*setting, seed)
            runs[setting].append(trials.trial(out, " ".join(map(str, (*setting, seed))), file, {"seed": seed, **fields}))
    made = list(itertools.chain(*runs.values()))
    diverged = {run for run, ended in zip(made, trials.Pool().make(made), strict=True) if not ended}
    if diverged and not may_diverge:
        raise trials.Broken(f"the run in {min(diverged).workdir} diverged; use fewer steps")
    return {setting: [] if diverged & {*of_seeds} else of_seeds for setting, of_seeds in runs.items()}
