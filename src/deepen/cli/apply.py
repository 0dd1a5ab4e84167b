"""`deepen apply`: write a checkpoint that has the program.

    text --read_program--> Program --Checkpoint.apply--> Checkpoint --Checkpoint.save--> folder

`deepen.program` reads the text, `deepen.checkpoint` does the rest; nothing is decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import deepen
from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import amount, pairs, print_json, program_text, runs, size
from deepen.cli.progress import progress
from deepen.errors import UsageError

if TYPE_CHECKING:
    from deepen.checkpoint.changes import Changes

# Lines of one kind that are printed before the rest is counted.
LISTED = 40


def apply(
    model: str,
    program: str,
    /,
    *,
    output: Annotated[str, Parameter(name=["--output", "-o"], help="A folder that does not exist yet.")] = "",
    bake: Annotated[bool, Parameter(negative="", help="Write shared layers out, for tools without deepen.")] = False,
    dry_run: Annotated[bool, Parameter(negative="", help="Print the changes and write nothing.")] = False,
    verify: Annotated[bool, Parameter(negative="", help="Load the result and compare its outputs.")] = False,
    adapter: Annotated[str | None, Parameter(help="The folder of a LoRA adapter to bring along.")] = None,
    max_shard_size: Annotated[str, Parameter(help="Most bytes of one weight file, such as 500MB.")] = "5GB",
    common: Common = DEFAULT,
) -> None:
    """Write a checkpoint that has the program, and print what changed.

    A pruned, reordered or copied model is written in its own standard format. A program that shares layers or needs
    deepen is written in deepen's format, each layer once; --bake writes it out instead.

    Parameters
    ----------
    model
        A checkpoint folder, a .gguf file or a hub id.
    program
        Such as '0-3 (4-7)*2 8-11', or @FILE.
    """
    from deepen.program import read_program

    if not output and not dry_run:
        raise UsageError("apply writes a folder: name it with -o DIR, or ask for --dry-run")
    shard = shard_bytes(max_shard_size)
    checkpoint = deepen.open(model, adapter=adapter).apply(read_program(program, common.form))
    changes = checkpoint.changes(bake=bake)
    if not dry_run:
        with progress(f"writing {output}", changes.bytes if common.dtype == "auto" else None, "bytes") as step:
            changes = checkpoint.save(
                output,
                bake=bake,
                dtype=common.stored_dtype(),
                verify=verify,
                max_shard_bytes=shard,
                progress=step,
            )
    text = program_text(checkpoint)
    if common.json:
        print_json({"program": text, "output": None if dry_run else output} | changes.to_json())
    else:
        print(describe(changes, text, None if dry_run else output))


def shard_bytes(text: str) -> int:
    """Bytes of a size such as `5GB`, `500MB` or `1000000`.

    Raises:
        UsageError: another text, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)i?B?", text.strip(), re.IGNORECASE)
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    count = int(float(match[1]) * factor[match[2].lower()]) if match else 0
    if count < 1:
        raise UsageError(f"--max-shard-size {text!r}: expected a size such as 5GB or 500MB")
    return count


def describe(changes: Changes, program: str, output: str | None) -> str:
    """The changes as text for people."""
    rows = [("program", program), ("form", changes.form)]
    for tower, layers in changes.layers.items():
        rows.append((f"{tower} layers", f"{len(layers)}: {runs(layers)}"))
    for name, (before, after) in changes.config.items():
        rows.append((f"config {name}", f"{_short(before)} -> {_short(after)}"))
    counts = {
        "kept": len(changes.kept),
        "renamed": len(changes.renamed),
        "computed": len(changes.computed),
        "dropped": len(changes.dropped),
    }
    rows.append(("tensors", ", ".join(f"{count} {name}" for name, count in counts.items())))
    lists = {
        "renamed": moves(changes.renamed),
        "computed": by_layer(changes.computed),
        "dropped": by_layer(changes.dropped),
    }
    for title, names in lists.items():
        rows += [(title if at == 0 else "", name) for at, name in enumerate(names[:LISTED])]
        if len(names) > LISTED:
            rows.append(("", f"... and {len(names) - LISTED} more lines (--json lists every tensor)"))
    rows += [("note" if at == 0 else "", text) for at, text in enumerate(changes.notes)]
    rows.append(("parameters", amount(changes.parameters)))
    if changes.files:
        rows.append(("files", ", ".join(f"{name} ({size(count)})" for name, count in changes.files)))
    else:
        rows.append(("size", size(changes.bytes)))
    if changes.max_logit_difference is not None:
        rows.append(("verified", f"largest difference of the outputs {changes.max_logit_difference:.3g}"))
    rows.append(("written", output or "nothing (dry run)"))
    return pairs(rows)


def by_layer(names: Iterable[str]) -> list[str]:
    """Names with those of whole layers drawn together: `model.layers 3-5 (27 tensors)`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        prefix, number = layer_of(name)
        layers.setdefault(prefix, []).append(number)
    lines = []
    for prefix, numbers in layers.items():
        if numbers == [-1]:
            lines.append(prefix)
        else:
            lines.append(f"{prefix} {runs(sorted(set(numbers)))} ({len(numbers)} tensors)")
    return lines


def moves(renamed: Mapping[str, str]) -> list[str]:
    """What moved from where, a line for each layer: `model.layers 3 <- 5 (9 tensors)`."""
    counts: dict[str, int] = {}
    for new, old in renamed.items():
        (prefix, to), (_, origin) = layer_of(new), layer_of(old)
        line = f"{prefix} <- {old}" if to < 0 else f"{prefix} {to:>3} <- {origin}"
        counts[line] = counts.get(line, 0) + 1
    return [f"{line} ({count} tensors)" if count > 1 else line for line, count in sorted(counts.items())]


def layer_of(name: str) -> tuple[str, int]:
    """The layer list and number in the name of a tensor; the whole name and -1 where there is none."""
    match = re.match(r"(.+?)\.(\d+)\.", name)
    return (match[1], int(match[2])) if match else (name, -1)


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
