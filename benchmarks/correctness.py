"""Dropping one layer of tiny models: is the folder that a tool writes the right model?

The reference is built by hand: a fresh model of the target depth, with every per-layer list of the config selected, and
the source's layers copied in. A tool is right on a family when plain transformers loads its folder without missing or
unexpected keys and gives the reference's logits, uncached and step by step with the cache. Weights are redrawn with
standard deviation 0.3 and windows are 8 of 24 tokens, so that faults show.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

import deepen
from benchmarks.harness import PEER_PYTHON, arguments, record
from deepen.errors import DeepenError

DEPTH, DROPPED, TOKENS, TOLERANCE = 6, 2, 24, 1e-4
PROGRAM, SLICES = "0-1 3-5", [(0, DROPPED), (DROPPED + 1, DEPTH)]
LLAMA = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 8}
GPT = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": DEPTH,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What differs from LLAMA, or the whole config where the names differ.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 8},
    "qwen2": {**LLAMA, **MIXED, "use_sliding_window": True},
    "qwen3": LLAMA,
    "phi3": {**LLAMA, "sliding_window": 8},
    "gemma2": {**LLAMA, **MIXED},
    "gemma3_text": {**LLAMA, **MIXED},
    "cohere2": {**LLAMA, **MIXED},
    "olmo2": LLAMA,
    "smollm3": {**LLAMA, "no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_neox": LLAMA,
    "phi": LLAMA,
    "falcon": {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 48,
        "new_decoder_architecture": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {**LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "bloom": {**GPT, "hidden_size": 32},
    "mamba": {**LLAMA, "state_size": 8, "time_step_rank": 4},
}
MERGE_ALL = """
import json, sys
from mergekit.scripts.run_yaml import main
failed = {}
for name, recipe, out in json.load(open(sys.argv[1])):
    try:
        main([recipe, out, "--no-copy-tokenizer", "--quiet"], standalone_mode=False)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
print(json.dumps(failed))
"""


def build(name: str, folder: Path) -> PreTrainedModel:
    """Writes a tiny model of the family and returns it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **FAMILIES[name]), attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
    model.save_pretrained(folder)
    return load(folder)[0]


def load(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model that plain transformers reads from a folder, and what it had to say about its keys."""
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), told


def reference(source: PreTrainedModel) -> PreTrainedModel:
    """The right model, made by hand."""
    config = source.config.to_dict()
    for key, value in config.items():
        if isinstance(value, list) and len(value) == DEPTH:
            config[key] = value[:DROPPED] + value[DROPPED + 1 :]
        elif key in ("num_hidden_layers", "n_layer"):
            config[key] = DEPTH - 1
    model = AutoModelForCausalLM.from_config(type(source.config).from_dict(config), attn_implementation="eager")
    kept = [layer for layer in range(DEPTH) if layer != DROPPED]
    state = source.state_dict()
    weights = {}
    for key in model.state_dict():
        weights[key] = state[re.sub(r"\.(\d+)\.", lambda found: f".{kept[int(found[1])]}.", key, count=1)]
    model.load_state_dict(weights)
    return model.eval()


def logits(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens at once, and half at once with the rest one by one through the cache."""
    ids = torch.arange(3, 3 + TOKENS)[None] * 7 % 90 + 3
    held = "cache_params" if model.config.model_type == "mamba" else "past_key_values"
    with torch.inference_mode():
        full = model(ids, use_cache=False).logits
        half = TOKENS // 2
        out = model(ids[:, :half], use_cache=True)
        steps = [out.logits]
        for position in range(half, TOKENS):
            out = model(ids[:, position : position + 1], use_cache=True, cache=out[held])
            steps.append(out.logits)
    return full, torch.cat(steps, 1)


def verdict(folder: Path, expected: torch.Tensor) -> str:
    """`right`, or what is wrong."""
    try:
        model, told = load(folder)
        lost = {key: len(told[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if told[key]}
        if lost:
            return "wrong: " + ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in lost.items())
        full, steps = logits(model)
    except Exception as error:  # any failure to load or run is a result here
        return f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    if full.shape != expected.shape:
        return "wrong: other shapes"
    scale = max(1.0, expected.abs().max().item())
    off = max((got - expected).abs().max().item() for got in (full, steps))
    return "right" if off <= TOLERANCE * scale else f"wrong: logits off by {off:.2g}"


def main() -> None:
    options = arguments(__doc__, rounds=1).parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="deepen-bench-") as folder:
        root = Path(folder)
        expected: dict[str, torch.Tensor] = {}
        for name in FAMILIES:
            right = reference(build(name, root / name / "source"))
            full, steps = logits(right)
            assert (full - steps).abs().max() <= TOLERANCE * max(1.0, full.abs().max().item()), name
            expected[name] = full
        table = {name: {"deepen": _deepen(root / name, expected[name])} for name in FAMILIES}
        for name, found in _mergekit(root, expected).items():
            table[name]["mergekit"] = found
    tools = [tool for tool in ("deepen", "mergekit") if tool in table["llama"]]
    for name, row in table.items():
        print(f"{name:12} " + "  ".join(f"{tool}: {row[tool]}" for tool in tools))
    counts = {tool: sum(row[tool] == "right" for row in table.values()) for tool in tools}
    print("right        " + "  ".join(f"{tool}: {count} of {len(table)}" for tool, count in counts.items()))
    record("correctness", {"families": table, "right": counts}, options.json)


def _deepen(folder: Path, expected: torch.Tensor) -> str:
    try:
        changes = deepen.open(folder / "source").apply(PROGRAM).save(folder / "deepen")
    except DeepenError as error:
        return f"fails: {error}"
    return verdict(folder / "deepen", expected) if changes.form == "plain" else f"not plain: {changes.notes[0]}"


def _mergekit(root: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, str]:
    if not PEER_PYTHON.exists():
        print("mergekit is not installed in benchmarks/.venv-peer: left out", file=sys.stderr)
        return {}
    jobs = []
    for name in expected:
        recipe = root / name / "slices.yaml"
        lines = [f"  - sources: [{{model: {root / name / 'source'}, layer_range: [{a}, {b}]}}]" for a, b in SLICES]
        recipe.write_text("\n".join(["merge_method: passthrough", "slices:", *lines]) + "\n", encoding="utf-8")
        jobs.append((name, str(recipe), str(root / name / "mergekit")))
    (root / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    command = [str(PEER_PYTHON), "-c", MERGE_ALL, str(root / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mergekit could not be run:\n{done.stderr}")
    failed = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        name: f"fails: {failed[name]}" if name in failed else verdict(root / name / "mergekit", logits_expected)
        for name, logits_expected in expected.items()
    }


if __name__ == "__main__":
    main()
