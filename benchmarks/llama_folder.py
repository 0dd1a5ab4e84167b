"""Writes a Llama-shaped checkpoint of random weights, fast: headers by hand, values from one block of random bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from math import prod
from pathlib import Path

BLOCK = 1 << 24


def llama_config(layers: int) -> dict[str, object]:
    """The shape of TinyLlama-1.1B with a depth of choice: 44 million parameters a layer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order in which the files hold them."""
    wide, inner, narrow, vocabulary = 2048, 5632, 256, 32000
    yield "model.embed_tokens.weight", (vocabulary, wide)
    for i in range(layers):
        place = f"model.layers.{i}"
        yield f"{place}.input_layernorm.weight", (wide,)
        yield f"{place}.mlp.down_proj.weight", (wide, inner)
        yield f"{place}.mlp.gate_proj.weight", (inner, wide)
        yield f"{place}.mlp.up_proj.weight", (inner, wide)
        yield f"{place}.post_attention_layernorm.weight", (wide,)
        yield f"{place}.self_attn.k_proj.weight", (narrow, wide)
        yield f"{place}.self_attn.o_proj.weight", (wide, wide)
        yield f"{place}.self_attn.q_proj.weight", (wide, wide)
        yield f"{place}.self_attn.v_proj.weight", (narrow, wide)
    yield "model.norm.weight", (wide,)
    yield "lm_head.weight", (vocabulary, wide)


def write_llama(folder: Path, layers: int = 20, shard_bytes: int = 500 * 10**6) -> int:
    """Writes config, index and shards of bfloat16 weights; returns the bytes of all tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(llama_config(layers), indent=2), encoding="utf-8")
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    for item in tensors(layers):
        if sum(2 * prod(shape) for _, shape in shards[-1]) + 2 * prod(item[1]) > shard_bytes and shards[-1]:
            shards.append([])
        shards[-1].append(item)
    block = _finite_block()
    owner: dict[str, str] = {}
    total = 0
    for number, content in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        owner |= {tensor: name for tensor, _ in content}
        total += _write_shard(folder / name, content, block)
    index = {"metadata": {"total_size": total}, "weight_map": owner}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return total


def _write_shard(path: Path, content: list[tuple[str, tuple[int, ...]]], block: bytes) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in content:
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, BLOCK):
            file.write(block[: min(BLOCK, end - start)])
    return end


def _finite_block() -> bytes:
    """Random bfloat16 values of magnitude below one: the top exponent bit cleared in every second byte."""
    values = bytearray(random.Random(0).randbytes(BLOCK))
    # Clearing bit 6 of the high byte leaves exponents below 128, so no infinity and no NaN.
    values[1::2] = values[1::2].translate(bytes(byte & 0b10111111 for byte in range(256)))
    return bytes(values)
