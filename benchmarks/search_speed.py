"""What shared evaluation saves on SmolLM2-135M: layer visits and time against separate passes.

Two sets of programs: the 30 removals of a single layer, and the candidates that a beam search for 75 % of the layers
asks for. Separate passes run on the same loaded model, one program after another, so that loading counts for neither.
The candidates of the search are recorded once and then evaluated round by round, as the search did.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

import deepen
from benchmarks.harness import alternate, arguments, ratio, record, timed
from deepen.cli.packaged import packaged_model, packaged_text
from deepen.probe.perplexity import window_losses
from deepen.probe.trie import Evaluator
from deepen.probe.windows import batches, cut


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--context", type=int, default=128, help="tokens of a window (default 128)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to evaluate on (default 256)")
    parser.add_argument("--candidates", type=int, default=200, help="of the beam search (default 200)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint, text = deepen.open(packaged_model()), packaged_text()
    reading = {"context": options.context, "tokens": options.tokens}
    depth = checkpoint.depth["text"]
    removals = [" ".join(str(at) for at in range(depth) if at != gone) for gone in range(depth)]
    asked: list[list[str]] = []
    evaluate = Evaluator.evaluate

    def noting(self: Evaluator, programs: Sequence[str], *given: Any, **more: Any) -> Any:
        asked.append([str(program) for program in programs])
        return evaluate(self, programs, *given, **more)

    Evaluator.evaluate = noting  # pyright: ignore[reportAttributeAccessIssue]
    try:
        print("beam search", file=sys.stderr)
        found = deepen.search(
            checkpoint, text, budget="0.75", method="beam", candidates=options.candidates,
            held_out_tokens=options.tokens, **reading,
        )  # fmt: skip
    finally:
        Evaluator.evaluate = evaluate
    evaluator = Evaluator(checkpoint)
    evaluator.evaluate(removals[:1], text, **reading)
    results: dict[str, Any] = {"threads": options.threads, **reading, "checks": evaluator.visits.checks}
    losses: dict[str, list[list[float]]] = {}

    def shared(rounds: Sequence[Sequence[str]]) -> None:
        found = [one for some in rounds for one in evaluator.evaluate(some, text, **reading)]
        losses["shared"] = [list(one.window_nll) for one in found]

    def separate(rounds: Sequence[Sequence[str]]) -> None:
        losses["separate"] = [alone(evaluator, program, text, reading) for some in rounds for program in some]

    # the last two readings are of the figures at the end
    for name, rounds in (("removals", [removals]), ("beam", asked[:-2])):
        before = evaluator.visits.run, evaluator.visits.separate
        contestants = {
            "shared": timed(lambda rounds=rounds: shared(rounds)),
            "separate": timed(lambda rounds=rounds: separate(rounds)),
        }
        print(f"{name}: {options.rounds} rounds", file=sys.stderr)
        measured = alternate(contestants, options.rounds)
        if losses["shared"] != losses["separate"]:
            raise SystemExit("shared and separate evaluation differ; their speed means nothing")
        run, apart = ((now - then) // options.rounds for now, then in zip(
            (evaluator.visits.run, evaluator.visits.separate), before, strict=True))  # fmt: skip
        results |= {
            f"{name}_programs": sum(map(len, rounds)),
            f"{name}_visits_shared": run,
            f"{name}_visits_separate": apart,
            f"{name}_visits_shared_to_separate": run / apart,
            f"{name}_visits_separate_to_shared": apart / run,
        }
        results |= {f"{name}_{who}_s": statistics.median(values) for who, values in measured.items()}
        results[f"{name}_shared_to_separate"] = ratio(measured["shared"], measured["separate"])
    results |= {"beam_program": found.program, "beam_cost": found.cost}
    for name, value in results.items():
        print(f"{name:34} {value}")
    record("search_speed", results, options.json)


def alone(evaluator: Evaluator, program: str, text: str, reading: dict[str, Any]) -> list[float]:
    """The losses of one program through the model's own forward, as if there were no others."""
    losses: list[float] = []
    with evaluator.bank.running(evaluator.bank.plan(program)) as model, torch.inference_mode():
        for group in batches(cut(evaluator.tokenizer, text, **reading), 1):
            ids = torch.tensor([window.ids for window in group])
            losses += window_losses(model(input_ids=ids, use_cache=False).logits, ids, group)
    return losses


if __name__ == "__main__":
    main()
