"""What a native stack costs against its peers: a training step, and greedy generation.

The shape is 8 layers of width 256 with 4 heads, feed-forward 688, vocabulary 256: Pre-LN with RMS norms, rotary
positions and SwiGLU on all sides. The contestants take turns on the same tokens. By default on one thread and in
processor time, which other load on the machine moves least. `--compile` compares compiled steps. `--smollm2` adds
generation from SmolLM2-135M. Peak memory is that of processes of their own that take one training step.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import deepen
from benchmarks.harness import alternate, arguments, peak_bytes, ratio, record, timed
from benchmarks.identity_speed import CLOCKS
from deepen.checkpoint.stack_weights import to_stack
from deepen.cli.packaged import packaged_model
from deepen.stack.config import StackConfig
from deepen.stack.generate import by_columns, generate
from deepen.stack.stack import Stack

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY = 8, 256, 4, 688, 256
PROMPT, NEW_TOKENS = 16, 64


def ours() -> nn.Module:
    config = StackConfig(layers=LAYERS, width=WIDTH, heads=HEADS, hidden=HIDDEN, vocabulary=VOCABULARY, tied=False)
    return Stack(config, seed=0)


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=HIDDEN,
            vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=1024,
        )
    )  # fmt: skip


def x_transformers() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper  # pyright: ignore[reportMissingImports]

    return TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=1024, use_abs_pos_emb=False,
        attn_layers=Decoder(
            dim=WIDTH, depth=LAYERS, heads=HEADS, attn_dim_head=WIDTH // HEADS, use_rmsnorm=True, rotary_pos_emb=True,
            ff_swish=True, ff_glu=True, ff_no_bias=True, ff_mult=HIDDEN / WIDTH, attn_flash=True,
        ),
    )  # fmt: skip


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "deepen": ours, "transformers": llama, "x-transformers": x_transformers,
}  # fmt: skip


def train_step(model: nn.Module, ids: torch.Tensor, compiled: bool) -> Callable[[], None]:
    """Forward, cross-entropy, backward, AdamW."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def loss() -> torch.Tensor:
        out: Any = model(ids)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    value = torch.compile(loss) if compiled else loss

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        value().backward()
        optimiser.step()

    step()
    return step


def makers(names: list[str]) -> dict[str, Callable[[], nn.Module]]:
    found = {name: MAKERS[name] for name in names}
    try:
        import x_transformers as _  # noqa: F401
    except ImportError:
        found.pop("x-transformers", None)
        print("x-transformers is not installed; left out", file=sys.stderr)
    return found


def training(options: Any) -> dict[str, Any]:
    """Seconds of a step, and its peak memory."""
    ids = torch.randint(0, VOCABULARY, (options.batch, options.tokens), generator=torch.Generator().manual_seed(0))
    models = {name: make() for name, make in makers(list(MAKERS)).items()}
    sizes = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
    steps = {
        name: timed(train_step(model, ids, options.compile), CLOCKS[options.clock]) for name, model in models.items()
    }
    measured = alternate(steps, options.rounds)
    words = ["--batch", str(options.batch), "--tokens", str(options.tokens)]
    words += ["--compile"] if options.compile else []
    peaks = {
        name: int(
            subprocess.run(
                [sys.executable, "-m", "benchmarks.stack_speed", "--peak-of", name, *words],
                capture_output=True, text=True, check=True,
            ).stdout.split()[-1]
        )
        for name in models
    }  # fmt: skip
    return {
        "parameters": sizes,
        "peak_bytes": peaks,
        **{f"train_deepen_to_{name}": ratio(measured["deepen"], measured[name]) for name in models if name != "deepen"},
    }


def generation(options: Any) -> dict[str, Any]:
    """Seconds of 64 greedy tokens after 16 at batch 1, transformers over ours, eager, with compiled steps and
    with compiled steps over matrices that are laid out by columns.

    Also the seconds a token of the products with the weights alone, laid out by rows: a bound for what leaves them so.
    """
    ids = torch.randint(0, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    pairs: dict[str, tuple[Stack, Any]] = {"toy": (ours().eval(), llama().eval())}  # pyright: ignore
    if options.smollm2:
        ck = deepen.open(packaged_model())
        pairs["smollm2"] = (to_stack(ck), ck.load(dtype=torch.float32).eval())
    found: dict[str, Any] = {}
    for name, (stack, model) in pairs.items():
        settings: dict[str, Any] = {
            "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0,
        }  # fmt: skip
        turned = by_columns(deepcopy(stack))
        contestants = {
            "deepen": timed(lambda stack=stack: generate(stack, ids, steps=NEW_TOKENS), CLOCKS[options.clock]),
            "compiled": timed(
                lambda stack=stack: generate(stack, ids, steps=NEW_TOKENS, compiled=True), CLOCKS[options.clock]
            ),
            "by columns": timed(
                lambda turned=turned: generate(turned, ids, steps=NEW_TOKENS, compiled=True), CLOCKS[options.clock]
            ),
            "transformers": timed(
                lambda model=model, settings=settings: model.generate(ids, **settings), CLOCKS[options.clock]
            ),
            "products": timed(products(stack), CLOCKS[options.clock]),
        }
        for run in contestants.values():
            run()
        measured = alternate(contestants, options.rounds if name == "toy" else max(3, options.rounds // 4))
        for other in ("deepen", "compiled", "by columns", "products"):
            found[f"generate_{name}_transformers_to_{other.replace(' ', '_')}"] = ratio(
                measured["transformers"], measured[other]
            )
    return found


def products(stack: Stack) -> Callable[[], None]:
    """The products of 64 tokens, one at a time, with every matrix that a token meets."""
    maps = [module for module in stack.modules() if isinstance(module, nn.Linear)]
    inputs = [torch.randn(1, 1, each.in_features) for each in maps]

    @torch.inference_mode()
    def run() -> None:
        for _ in range(NEW_TOKENS):
            for each, x in zip(maps, inputs, strict=True):
                each(x)

    return run


def main() -> None:
    parser = arguments(__doc__, rounds=11)
    parser.add_argument("--batch", type=int, default=16, help="windows of a training batch (default 16)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a window (default 256)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="wall clock, or processor time (default)")
    parser.add_argument("--compile", action="store_true", help="compile the training steps")
    parser.add_argument("--smollm2", action="store_true", help="also generate from SmolLM2-135M")
    parser.add_argument("--generate-only", action="store_true", help="leave the training steps out")
    parser.add_argument("--peak-of", choices=MAKERS, help="only print the peak of one, in bytes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        ids = torch.randint(0, VOCABULARY, (options.batch, options.tokens))
        train_step(MAKERS[options.peak_of](), ids, options.compile)()
        print(peak_bytes())
        return
    results: dict[str, Any] = {"threads": options.threads, "clock": options.clock, "compiled": options.compile}
    results |= {} if options.generate_only else training(options)
    results |= generation(options)
    for name, value in results.items():
        print(f"{name:44} {value}")
    record("stack_speed", results, options.json)


if __name__ == "__main__":
    main()
