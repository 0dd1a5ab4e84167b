"""`deepen demo`: change the depth of a real model, score its layers, search a shorter program; writes one HTML page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import deepen
from deepen.cli.data import read_text
from deepen.cli.options import DEFAULT, Common
from deepen.cli.output import amount, note, print_json, program_text, size, table
from deepen.cli.packaged import TEXT_NAME, packaged_model, packaged_text
from deepen.cli.progress import progress
from deepen.errors import FamilyError, SaveError, UsageError

if TYPE_CHECKING:
    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.load import PreTrainedTokenizerBase
    from deepen.probe.perplexity import Evaluation
    from deepen.program import Cost

CONTEXT = 512
SAMPLE_TOKENS = 24
PROMPT = "Why is the sky blue?"
FEWEST_LAYERS = 6


@dataclass(frozen=True)
class Result:
    """One program of the demo: what it is, predicts, costs and writes."""

    name: str
    program: str
    evaluation: Evaluation
    cost: Cost
    sample: str
    writing: float | None


def demo(
    *,
    model: Annotated[str, Parameter(help="Another causal model: a folder, a .gguf file or a hub id.")] = "",
    data: Annotated[str, Parameter(help="Another text, UTF-8.")] = "",
    out: Annotated[str, Parameter(help="Folder of the page.")] = "demo",
    tokens: Annotated[int, Parameter(help="Tokens of the text to read.")] = 1024,
    prompt: Annotated[str, Parameter(help="What every program answers or continues.")] = PROMPT,
    common: Common = DEFAULT,
) -> None:
    """Change the depth of a real model, score its layers, search a shorter program; writes one HTML page.

    Drops each third of the depth, repeats a block in the middle, runs two layers side by side, bakes one of these and
    reloads it with plain transformers. Then scores every layer and searches the best three quarters of them, beside
    the published rule. Takes a few minutes on two cores.
    """
    from deepen.cli.baked import bake_and_compare
    from deepen.cli.demo_page import write_page
    from deepen.cli.demo_search import BUDGET, score_and_search, search_table
    from deepen.cli.show import report as show_text
    from deepen.probe.once import read_once
    from deepen.probe.windows import encode

    started = time.perf_counter()
    path = model or str(packaged_model())
    text = read_text(data) if data else packaged_text()
    device = common.torch_device()
    opened = deepen.open(path)
    programs = choose(opened)
    with folder(Path(out)) as place:
        shared = read_once(opened)
        if not common.json:
            print(show_text(opened))
        tokenizer = opened.tokenizer()
        results = []
        for at, (name, program) in enumerate(programs.items()):
            note(f"[{at + 1}/{len(programs) + 2}] {name}: {program}")
            candidate = shared.apply(program)
            results.append(measure(name, candidate, tokenizer, text, tokens, prompt, device, common.torch_dtype()))
        chosen = next(name for name in programs if name.startswith("repeat"))
        note(f"[{len(programs) + 1}/{len(programs) + 2}] bake {programs[chosen]}")
        ids, _ = encode(tokenizer, text, min(tokens, 128))
        baked = bake_and_compare(shared.apply(programs[chosen]), ids, place)
        note(f"[{len(programs) + 2}/{len(programs) + 2}] score, and search {BUDGET} of the layers")
        kept = score_and_search(shared, text, tokens, device, common.torch_dtype(), model, data)
        seconds = time.perf_counter() - started
        page = place / "index.html"
        write_page(page, opened, model, data, prompt, results, programs[chosen], baked, kept, seconds)
    document = {
        "model": path,
        "text": data or TEXT_NAME,
        "results": [
            {
                "name": result.name,
                "program": result.program,
                **result.evaluation.to_json(),
                "params": result.cost.params,
                "cache_bytes": result.cost.cache_bytes,
                "cache_context": result.cost.context,
                "writing_tokens_per_second": result.writing,
                "sample": result.sample,
            }
            for result in results
        ],
        "baked": {"program": programs[chosen], **asdict(baked), "tolerance": baked.tolerance, "equal": baked.equal},
        "scores": kept[0].document,
        "searches": [each.document for each in kept[1:]],
        "page": str(page),
        "seconds": seconds,
    }
    if common.json:
        print_json(document)
        return
    print()
    print(table(rows(results), left=2))
    print()
    print(prompt)
    for result in results:
        print(f"{result.name}:\n  {result.sample}")
    print(
        f"\nbaked {programs[chosen]} into {baked.layers} plain layers; reloaded with plain transformers the logits of "
        f"{baked.tokens} tokens differ by at most {baked.difference:.3g}\n(tolerance {baked.tolerance:.3g}, 4 x the "
        f"{baked.own:.3g} between the model's own eager and sdpa attention; largest logit {baked.largest:.3g})"
    )
    print()
    print(search_table(kept[1:]))
    print(f"\n{page} written after {seconds:.0f} s")


def choose(checkpoint: Checkpoint) -> dict[str, str]:
    """The programs of the demo for a model of this depth.

    Raises:
        FamilyError: a model with several towers.
        UsageError: a model of too few layers to cut into thirds.
    """
    if len(checkpoint.depth) != 1:
        raise FamilyError(
            f"the demo takes a causal model with one tower; {checkpoint.family.model_type} has "
            f"{', '.join(checkpoint.depth)}"
        )
    depth = next(iter(checkpoint.depth.values()))
    if depth < FEWEST_LAYERS:
        raise UsageError(f"the demo cuts thirds out of a model: expected at least {FEWEST_LAYERS} layers, got {depth}")
    first_cut, second_cut, middle = depth // 3, depth - depth // 3, depth // 2
    width = max(2, depth // 10)
    start = middle - width // 2
    stop = start + width
    loop = f"({span(start, stop)})*2"
    pair = f"{{{middle}|{middle + 1}}}"
    return {
        "as it is": span(0, depth),
        "without the first third": span(first_cut, depth),
        "without the middle third": f"{span(0, first_cut)} {span(second_cut, depth)}",
        "without the last third": span(0, second_cut),
        f"repeat layers {start}-{stop - 1}": f"{span(0, start)} {loop} {span(stop, depth)}",
        f"layers {middle} and {middle + 1} side by side": f"{span(0, middle)} {pair} {span(middle + 2, depth)}",
    }


def span(start: int, stop: int) -> str:
    """Layers from `start` to before `stop`."""
    return f"{start}-{stop - 1}" if stop - start > 1 else f"{start}"


def measure(
    name: str,
    candidate: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    tokens: int,
    prompt: str,
    device: str,
    dtype: str | None,
) -> Result:
    """Evaluates one program and lets it write."""
    from deepen.cli.run import Stream, encode, generate
    from deepen.probe.perplexity import perplexity

    model = candidate.load(dtype=dtype, device=device)
    with progress(name, None, "windows") as step:
        evaluation = perplexity(model, tokenizer, text, context=CONTEXT, tokens=tokens, progress=step)
    ids, _ = encode(tokenizer, prompt, chat=True)
    stream = Stream(tokenizer, quiet=True)
    generate(model, tokenizer, ids, stream, tokens=SAMPLE_TOKENS)
    cost = candidate.cost(CONTEXT)
    sample = " ".join(stream.text.split()) or "(nothing that can be printed)"
    note(f"      perplexity {amount(evaluation.perplexity)}, {evaluation.tokens_per_second:.4g} tokens/s: {sample}")
    return Result(name, program_text(candidate), evaluation, cost, sample, stream.rate)


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """The results as the cells of one table."""
    heading = ("", "program", "perplexity", "bits/byte", "reads tokens/s", "writes tokens/s", f"cache at {CONTEXT}")
    return [
        heading,
        *(
            (
                result.name,
                result.program,
                amount(result.evaluation.perplexity),
                f"{result.evaluation.bits_per_byte:.3f}",
                f"{result.evaluation.tokens_per_second:.4g}",
                "-" if result.writing is None else f"{result.writing:.3g}",
                size(result.cost.cache_bytes),
            )
            for result in results
        ),
    ]


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """The folder of the page; one that was made here goes again if the demo fails.

    Raises:
        SaveError: it cannot be made.
    """
    made = not path.exists()
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise SaveError(f"--out {path}: cannot make this folder: {error.strerror}; give another") from error
    try:
        yield path
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
