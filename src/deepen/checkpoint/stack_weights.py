"""Weights of Llama-, Mistral-, Qwen- and GPT-2-shaped checkpoints in a native stack, and back.

| in the stack | in Llama, Mistral, Qwen 2 and 3 | in GPT-2 |
|---|---|---|
| a.sublayer.qkv | self_attn.q_proj, k_proj, v_proj, one below the other | attn.c_attn, turned |
| a.sublayer.q_norm, k_norm | self_attn.q_norm, k_norm | - |
| a.sublayer.out | self_attn.o_proj | attn.c_proj, turned |
| f.sublayer.up | mlp.gate_proj, up_proj, one below the other | mlp.c_fc, turned |
| f.sublayer.down | mlp.down_proj | mlp.c_proj, turned |
| a.norm, f.norm | input_layernorm, post_attention_layernorm | ln_1, ln_2 |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from deepen.checkpoint.computed import layer_tensors
from deepen.checkpoint.open import open_checkpoint
from deepen.errors import CheckpointError, FamilyError
from deepen.stack.config import StackConfig
from deepen.stack.stack import Stack

if TYPE_CHECKING:
    from deepen.checkpoint.changes import Changes
    from deepen.checkpoint.checkpoint import Checkpoint

_LLAMA = {
    "a.norm": ("input_layernorm",),
    "a.sublayer.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "a.sublayer.q_norm": ("self_attn.q_norm",),
    "a.sublayer.k_norm": ("self_attn.k_norm",),
    "a.sublayer.out": ("self_attn.o_proj",),
    "f.norm": ("post_attention_layernorm",),
    "f.sublayer.up": ("mlp.gate_proj", "mlp.up_proj"),
    "f.sublayer.down": ("mlp.down_proj",),
}
_GPT2 = {
    "a.norm": ("ln_1",),
    "a.sublayer.qkv": ("attn.c_attn",),
    "a.sublayer.out": ("attn.c_proj",),
    "f.norm": ("ln_2",),
    "f.sublayer.up": ("mlp.c_fc",),
    "f.sublayer.down": ("mlp.c_proj",),
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the tensors of one family lie.

    Attributes:
        maps: module of a stack's layer -> modules of the family's layer whose rows it holds.
        ends: module of the stack -> module of the family outside of the layers.
        prefix: of the layers.
        turned: modules whose matrices are transposed, by the end of their name.
        config: the family's config -> fields of the stack's.
        back: the stack's config -> the family's.
    """

    maps: Mapping[str, tuple[str, ...]]
    ends: Mapping[str, str]
    prefix: str
    turned: tuple[str, ...] = ()
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    back: Callable[[StackConfig], dict[str, Any]]


def to_stack(ck: Checkpoint, *, wiring: str | dict[str, Any] = "pre-ln") -> Stack:
    """A native stack with the weights and the program of a checkpoint, in fp32.

    Args:
        ck: Llama-, Mistral-, Qwen- or GPT-2-shaped.
        wiring: one that equals Pre-LN at initialisation, so that the logits stay.

    Raises:
        FamilyError: another family, a setting that a stack does not have, or a wiring that equals something else.
        ProgramError: a program that a stack or the wiring does not execute.
    """
    from deepen.registry import lookup

    kind = ck.config.get("model_type", "")
    form = _form(ck.where, kind)
    name = wiring if isinstance(wiring, str) else str(wiring.get("name"))
    if not getattr(lookup(name).implementation, "equals", ""):
        raise FamilyError(
            f"{ck.where}: the wiring {name} equals no Pre-LN model at initialisation; trained weights go wrong in it"
        )
    if ck.owned is not None or ck.factors or ck.widths or ck.experts:
        raise FamilyError(
            f"{ck.where}: layers of different widths, factors, experts or owned parameters do not go into a stack"
        )
    tower = ck.family.tower("")
    depth = ck.depth[tower.name]
    fields = {**form.config(dict(ck.config)), "layers": depth, "program": str(ck.program), "wiring": wiring}
    if isinstance(window := fields.get("window"), tuple):
        fields["window"] = tuple(window[origin] for origin in ck.banks[tower.name])
    stack = Stack(StackConfig.read(fields), seed=0)
    state = dict(stack.state_dict())
    loaded: dict[str, torch.Tensor] = {}
    for child, key in enumerate(stack.written.keys):
        names = layer_tensors(ck, tower, key.layer)
        zero = stack.written.inits.get(key) == "zero"
        for own, sources in form.maps.items():
            for suffix in ("weight", "bias"):
                target = f"layers.{child}.{own}.{suffix}"
                if target not in state:
                    continue
                parts = [_turned(ck.source.read(names[f"{each}.{suffix}"]), each, suffix, form) for each in sources]
                tensor = torch.cat(parts).float() if len(parts) > 1 else parts[0].float()
                loaded[target] = torch.zeros_like(tensor) if zero and own.endswith((".out", ".down")) else tensor
    for own, source in form.ends.items():
        for suffix in ("weight", "bias"):
            if f"{own}.{suffix}" in state and not (own == "head" and stack.config.tied):
                loaded[f"{own}.{suffix}"] = ck.source.read(
                    f"{_placed(source, ck.disk[tower.name].prefix)}.{suffix}"
                ).float()
    if stack.config.tied:
        loaded["head.weight"] = loaded["embedding.weight"]
    missing = [name for name in state if name not in loaded and name.split(".")[0] not in ("wiring", "owned")]
    if missing:
        raise CheckpointError(f"{ck.where}: no tensor for {missing[0]} of the stack")
    stack.load_state_dict({**state, **loaded})
    return stack.eval()


def save_stack(stack: Stack, folder: str | Path, model_type: str) -> Changes:
    """Saves a stack as a checkpoint of a family that transformers knows; the program comes along.

    Args:
        stack: Pre-LN, and without parameters of its program.
        folder: a new folder.
        model_type: `llama`, `mistral`, `qwen2`, `qwen3` or `gpt2`.

    Raises:
        FamilyError: the family has no layer like the stack's, or its residual stream is wired otherwise.
        SaveError: the folder cannot be written.
    """
    form = _form(str(folder), model_type)
    name, _ = stack.config.wiring_options
    if name != "pre-ln" or list(stack.owned.parameters()):
        what = f"the wiring {name}" if name != "pre-ln" else "parameters of the program"
        raise FamilyError(f"{model_type} has no place for {what}; save the stack itself with save_pretrained")
    config = {"model_type": model_type, **form.back(stack.config)}
    again = {**form.config(config), "layers": stack.config.layers, "program": stack.config.program}
    differing = _differing(StackConfig.read({**again, "init": stack.config.init}), stack.config)
    if differing:
        raise FamilyError(f"{model_type} cannot express {differing[0]} = {getattr(stack.config, differing[0])!r}")
    with TemporaryDirectory(dir=Path(folder).resolve().parent) as place:
        save_file(dict(_tensors(stack, form)), Path(place) / "model.safetensors", metadata={"format": "pt"})
        Path(place, "config.json").write_text(json.dumps(config), encoding="utf-8")
        ck = open_checkpoint(place)
        return ck.apply(stack.config.program or str(ck.program)).save(folder)


def _tensors(stack: Stack, form: Form) -> Iterator[tuple[str, torch.Tensor]]:
    state = stack.state_dict()
    kv = (stack.config.kv_heads or stack.config.heads) * stack.config.head
    sizes = {3: (stack.config.heads * stack.config.head, kv, kv), 2: (stack.config.inner, stack.config.inner)}
    for child in range(stack.config.layers):
        for own, targets in form.maps.items():
            for suffix in ("weight", "bias"):
                tensor = state.get(f"layers.{child}.{own}.{suffix}")
                if tensor is None:
                    continue
                parts = tensor.split(sizes[len(targets)]) if len(targets) > 1 else (tensor,)
                for target, part in zip(targets, parts, strict=True):
                    turned = _turned(part, target, suffix, form)
                    yield f"{form.prefix}.{child}.{target}.{suffix}", turned.contiguous()
    for own, target in form.ends.items():
        for suffix in ("weight", "bias"):
            if f"{own}.{suffix}" in state and not (own == "head" and stack.config.tied):
                yield f"{target}.{suffix}", state[f"{own}.{suffix}"].contiguous()


def _placed(name: str, prefix: str) -> str:
    """The name of a module of the family where its layers lie under `prefix`, which may lack the first word."""
    root, _, rest = name.partition(".")
    return name if not rest or prefix.startswith(f"{root}.") else rest


def _turned(tensor: torch.Tensor, name: str, suffix: str, form: Form) -> torch.Tensor:
    return tensor.T if suffix == "weight" and name.endswith(form.turned or ("\0",)) else tensor


def _differing(one: StackConfig, other: StackConfig) -> list[str]:
    """The fields in which two configurations build different stacks; defaults count as what they come to."""
    left_out = ("kv_heads", "head_width", "hidden", "window")
    fields = [name for name in StackConfig.model_fields if name not in (*left_out, "hidden_multiple", "program")]
    found = [name for name in fields if getattr(one, name) != getattr(other, name)]
    sizes = [
        (each.kv_heads or each.heads, each.head, each.inner, [each.window_of(i) for i in range(each.layers)])
        for each in (one, other)
    ]
    return found + [name for name, a, b in zip(left_out, *sizes, strict=True) if a != b]


def _form(where: str, model_type: str) -> Form:
    if model_type not in FORMS:
        raise FamilyError(f"{where}: a stack takes weights of {', '.join(FORMS)}; got {model_type or 'no model type'}")
    return FORMS[model_type]


def _llama_config(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config["model_type"]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rotary = rope.get("rope_type", rope.get("type", "default")) or "default"
    if rotary != "default":
        raise FamilyError(f"{kind}: a stack has no rotary positions of the kind {rotary!r}")
    if config.get("hidden_act", "silu") != "silu":
        raise FamilyError(f"{kind}: a stack's gated feed-forward uses silu, not {config['hidden_act']!r}")
    if kind == "qwen3" and config.get("attention_bias"):
        raise FamilyError(
            "qwen3: attention_bias puts a bias on the output of the attention alone; a stack has none there"
        )
    if kind == "llama" and bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        raise FamilyError("llama: attention_bias without mlp_bias (or the reverse) has no stack")
    depth, window = config["num_hidden_layers"], config.get("sliding_window")
    if kind.startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    kinds = config.get("layer_types") or ["full_attention" if window is None else "sliding_attention"] * depth
    windows = tuple(window if each == "sliding_attention" else None for each in kinds)
    return {
        "layers": depth,
        "width": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_width": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "hidden": config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "context": config.get("max_position_embeddings", 2048),
        "rotary_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "window": windows if any(windows) else None,
        "qk_norm": kind == "qwen3",
        "eps": config.get("rms_norm_eps", 1e-6),
        "qkv_bias": kind == "qwen2" or bool(config.get("attention_bias")),
        "bias": bool(config.get("mlp_bias")),
        "tied": bool(config.get("tie_word_embeddings")),
    }


def _llama_back(kind: str, config: StackConfig) -> dict[str, Any]:
    window = next((each for each in map(config.window_of, range(config.layers)) if each is not None), None)
    types = ["full_attention" if config.window_of(i) is None else "sliding_attention" for i in range(config.layers)]
    fields: dict[str, Any] = {
        "architectures": [
            {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind] + "ForCausalLM"
        ],
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head,
        "intermediate_size": config.inner,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": config.tied,
        "torch_dtype": "float32",
    }
    if kind == "llama":
        fields |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    if kind == "mistral":
        fields |= {"sliding_window": window}
    if kind.startswith("qwen"):
        fields |= {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types}
    return fields


def _gpt2_config(config: Mapping[str, Any]) -> dict[str, Any]:
    act = config.get("activation_function", "gelu_new")
    forms = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}
    if act not in forms:
        raise FamilyError(f"gpt2: a stack's feed-forward uses gelu, not {act!r}")
    for name, normal in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if config.get(name, normal) != normal:
            raise FamilyError(f"gpt2: {name} = {config[name]} has no stack")
    return {
        "layers": config["n_layer"],
        "width": config["n_embd"],
        "heads": config["n_head"],
        "hidden": config.get("n_inner") or 4 * config["n_embd"],
        "vocabulary": config["vocab_size"],
        "context": config["n_positions"],
        "feed_forward": "gelu",
        "gelu": forms[act],
        "positions": "learned",
        "norm": "layer",
        "eps": config.get("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "bias": True,
        "tied": bool(config.get("tie_word_embeddings", True)),
    }


def _gpt2_back(config: StackConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.layers,
        "n_embd": config.width,
        "n_head": config.heads,
        "n_inner": config.inner,
        "vocab_size": config.vocabulary,
        "n_positions": config.context,
        "activation_function": "gelu_new" if config.gelu == "tanh" else "gelu",
        "layer_norm_epsilon": config.eps,
        "tie_word_embeddings": config.tied,
        "torch_dtype": "float32",
    }


def _llama(kind: str) -> Form:
    return Form(
        maps=_LLAMA,
        ends={"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
        prefix="model.layers",
        config=_llama_config,
        back=lambda config: _llama_back(kind, config),
    )


FORMS = {kind: _llama(kind) for kind in ("llama", "mistral", "qwen2", "qwen3")} | {
    "gpt2": Form(
        maps=_GPT2,
        ends={
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        prefix="transformer.h",
        turned=("c_attn", "c_proj", "c_fc"),
        config=_gpt2_config,
        back=_gpt2_back,
    )
}
