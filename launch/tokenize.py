"""Tokenize text once, into files that runs map into memory.

    python -m launch.tokenize --data=docs --out=tokens
    python -m launch.tokenize --data=docs --out=tokens --tokenizer=bpe --vocabulary=4000

Text is read as by runs: a file or folder, JSON lines, Parquet, or module:NAME; it may be larger than memory. Train on the result with

    python -m launch.train --config=configs/llama.py --config.data.path=tokens --config.data.tokenizer=shards --workdir=runs/tokens
"""

import pathlib

from absl import flags

from decjax.tasks import bpe, shards, sources
from launch import command

_DATA = flags.DEFINE_string("data", None, "Text; empty: the sources of Python's standard library.")
_FIELD = flags.DEFINE_string("field", sources.FIELD, "Field of JSON lines or Parquet that holds the text.")
_OUT = flags.DEFINE(command.FOLDER, "out", None, "Folder to write.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", "bytes, bpe, or the path of a tokenizer.json or its folder.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", None, "Size of the vocabulary of bpe.", bpe.BYTES, bpe.MOST)
flags.mark_flags_as_required(["data", "out"])


def main(argv: list[str]) -> int:
    command.options_only(argv)
    out, tokenizer, is_bpe = pathlib.Path(_OUT.value or ""), _TOKENIZER.value, _TOKENIZER.value == "bpe"
    command.check(
        (not (out / shards.INDEX).exists(), f"--out={str(out)!r} has an {shards.INDEX} already", "choose another --out"),
        (is_bpe or _VOCABULARY.value is None, f"--vocabulary has no effect with --tokenizer={tokenizer}", "leave it out"),
        (not is_bpe or _VOCABULARY.value is not None, "--tokenizer=bpe needs --vocabulary", "use --vocabulary=4000"),
    )
    index = shards.write(_DATA.value or "", out, tokenizer=tokenizer or "", vocabulary=_VOCABULARY.value or 0, field=_FIELD.value)
    counts = ", ".join(
        f"{index[part]['tokens']:,} tokens for {name}" for part, name in zip(shards.PARTS, ("training", "validation"))
    )
    num_bytes, num_tokens = (sum(index[part][unit] for part in shards.PARTS) for unit in ("bytes", "tokens"))
    command.console().print(
        f"{counts}, {num_bytes / num_tokens:.2f} bytes per token, vocabulary {index['vocabulary']:,}, {index['dtype']} in {out}",
        markup=False,
    )
    return 0


if __name__ == "__main__":
    command.run(main, errors=(ValueError,))
