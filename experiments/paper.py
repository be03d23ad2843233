"""The claims of arXiv 2410.11998 on tasks of this machine's size: makes what is missing, then tables and figures.

    python -m experiments.paper --out=runs/paper --multi30k=data/multi30k --cifar10=data/cifar10 --shakespeare=data/shakespeare.txt
    python -m experiments.paper --out=runs/paper --only=noise_floor,digits
    python -m experiments.paper --out=runs/smoke --only=digits --smoke

Parts: noise_floor, and quality at equal tokens on each of translation, cifar, digits, python (the standard library's sources as
text) and shakespeare. Trainings are made two at a time; the same command continues.
"""

from absl import flags

from experiments import noise_floor, quality, script, trials
from launch import command

FLAGS = flags.FLAGS
PARTS = ("noise_floor", *quality.STUDIES)


def main() -> None:
    out, chosen = command.folder("out", FLAGS.out), FLAGS.only or list(PARTS)
    if unknown := [part for part in chosen if part not in PARTS]:
        command.fail(f"--only={unknown[0]} is unknown; use some of {', '.join(PARTS)}")
    for part in chosen:
        if part in quality.STUDIES and (needed := quality.STUDIES[part].data) and not FLAGS[needed].value:
            command.fail(f"{part} needs --{needed}; give the path of its data, or leave it out: --only={PARTS[0]}")
    for part in chosen:
        picture = str(out / f"{part}.png")
        if part == "noise_floor":
            found = noise_floor.run(out, FLAGS.smoke)
            script.show(noise_floor.tabulate(found))
            noise_floor.draw(picture, found)
            script.save(str(out / f"{part}.json"), **found)
        else:
            given = quality.STUDIES[part]
            data: str = FLAGS[given.data].value if given.data else ""  # pyright: ignore[reportAssignmentType]
            found = quality.run(out, part, data, FLAGS.smoke)
            script.show(part, quality.tabulate(part, found))
            quality.draw(picture, part, found)
            script.save(str(out / f"{part}.json"), **{method: result._asdict() for method, result in found.items()})


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Run directories, tables as JSON, and figures go here.", required=True)
    flags.DEFINE_list("only", [], "Parts to make; none: all.")
    flags.DEFINE_string("multi30k", None, "Folder of Multi30k's parallel files.")
    flags.DEFINE_string("cifar10", None, "Folder of CIFAR-10's binary version.")
    flags.DEFINE_string("shakespeare", None, "A text that no rate of the config files was tuned on, such as Tiny Shakespeare.")
    flags.DEFINE_bool("smoke", False, "The whole way with tiny models, in minutes.")
    script.run(main, (trials.Broken, OSError))
