"""Reads GGUF files of Llama-like models as if they were Hugging Face checkpoints.

Names, shapes and the config are translated from the file's own fields, and a field or tensor that this file does not
know is refused, because it may change what the model computes. Tensors are dequantised one at a time to F32. Files of
architecture `llama` store the rows of q and k for rotary pairs (0,1), (2,3) ...; transformers wants (0,d/2),
(1,d/2+1) ..., so those rows are put back. Mistral models are GGUF files of architecture `llama` and load as Llama.

The header is parsed here, in one pass over its bytes (the reader of the `gguf` package maps the file into memory and
takes seconds for the token list); the `gguf` package decodes the quantised values.

    GGUF | version | tensors | fields | name, type, value of each | name, shape, type, offset of each | data
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from deepen.checkpoint.sources import ByteRange, TensorInfo, read_bytes
from deepen.errors import CheckpointError, nearest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from transformers import PreTrainedTokenizerBase

# Architecture in the file -> architectures entry of the config; the model_type is the same word.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Fields `<architecture>.<field>` that are read below, or that say nothing the tensors do not say.
_FIELDS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
    "attention.layer_norm_rms_epsilon", "vocab_size", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "expert_count", "expert_used_count", "tensor_data_layout",
}  # fmt: skip


# Numbers of field types and their struct formats; 8 is text, 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in the file; `shape` has the slowest axis first, as in torch."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    place: ByteRange

    def decode(self) -> np.ndarray:
        """The values, fp32, in memory of their own."""
        import gguf
        import numpy as np

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        rows = np.frombuffer(read_bytes(self.place), dtype=np.uint8).reshape(-1, self.shape[-1] // block * size)
        return gguf.dequantize(rows, self.kind).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFSource:
    """The tensors of a GGUF file under their Hugging Face names, all F32. Build it with `open_gguf`."""

    infos: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    files: tuple[Path, ...]
    # Hugging Face name -> (stored tensor, heads whose rotary rows are to be put back or 0).
    tensors: Mapping[str, tuple[Stored, int]]

    def range(self, name: str) -> ByteRange | None:
        """None: no tensor lies in the file as it is offered here."""
        self._tensor(name)
        return None

    def read(self, name: str) -> torch.Tensor:
        """The dequantised tensor, fp32, in memory of its own on the CPU.

        Raises:
            CheckpointError: there is no tensor of this name, or the file has changed.
        """
        import numpy as np
        import torch

        stored, heads = self._tensor(name)
        values = stored.decode()
        if heads:
            pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return torch.from_numpy(np.ascontiguousarray(values))

    def _tensor(self, name: str) -> tuple[Stored, int]:
        if name not in self.tensors:
            raise CheckpointError(f"{self.files[0]}: there is no tensor {name!r}{nearest(name, self.tensors)}")
        return self.tensors[name]


def open_gguf(path: Path) -> tuple[dict[str, Any], GGUFSource]:
    """Opens a GGUF file: its config as transformers writes it, and its tensors.

    Raises:
        CheckpointError: no such file, not GGUF, another architecture, or fields and tensors that cannot be expressed.
    """
    fields, stored = read_gguf_header(path)
    architecture = str(fields.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        way = "convert the original checkpoint instead, or load this one with transformers and save it"
        _fail(path, f"an architecture among {', '.join(ARCHITECTURES)}", repr(architecture), way)
    if (parts := fields.get("split.count", 1)) not in (0, 1):
        _fail(path, "a whole model in one file", f"a part of {parts}", "join them: llama-gguf-split --merge")
    config = _config(path, architecture, fields, stored)
    tensors: dict[str, tuple[Stored, int]] = {}
    infos: dict[str, TensorInfo] = {}
    for theirs, ours, shape in _tensors(config):
        if theirs not in stored:
            _fail(path, f"a tensor {theirs}", "none", "the file is incomplete, or of a variant that is not supported")
        tensor = stored.pop(theirs)
        if tensor.shape != shape:
            expected = f"{theirs} of shape {shape} by the file's own fields"
            _fail(path, expected, str(tensor.shape), "fetch the file again")
        tensors[ours] = tensor, _rotary_heads(config, theirs)
        infos[ours] = TensorInfo("F32", shape)
    stored.pop("rope_freqs.weight", None)
    if stored:
        names = ", ".join(sorted(stored)[:5])
        _fail(path, f"only tensors of a plain {architecture} model", names, "this variant is not supported")
    _check_kinds(path, [tensor for tensor, _ in tensors.values()])
    texts = {name: value for name, value in fields.items() if name.startswith("general.") and isinstance(value, str)}
    return config, GGUFSource(infos, texts, (path,), tensors)


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer stored in a GGUF file, with its chat template if it has one.

    Raises:
        CheckpointError: the file has none, or one that transformers cannot convert.
    """
    if "tokenizer.ggml.tokens" not in read_gguf_header(path)[0]:
        _fail(path, "a tokenizer (tokenizer.ggml.tokens)", "none", "give the folder of the tokenizer separately")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # Its conversion has no error class of its own: a missing or odd field surfaces as whatever Python raises.
    except Exception as error:
        way = "give the folder of the tokenizer separately"
        raise CheckpointError(f"{path}: transformers cannot convert its tokenizer ({error}); {way}") from error


def read_gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Every field and every tensor of a GGUF file by name; no tensor bytes are read.

    Raises:
        CheckpointError: the file or the `gguf` package is missing, or the header is damaged.
    """
    again = "fetch the file again"
    if not path.is_file():
        _fail(path, "a GGUF file", "a folder" if path.is_dir() else "nothing", "check the path")
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"{path}: reading GGUF needs a package; pip install 'deepen[gguf]'") from error
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if (magic := file.read(4)) != b"GGUF":
                _fail(path, "a file that starts with GGUF", repr(magic), "check the path")
            header = _Header(path, file, size)
            if (version := header.number("I")) not in (2, 3):
                _fail(path, "GGUF version 2 or 3, little endian", str(version), "convert the file again")
            tensors, count = header.count(), header.count()
            fields: dict[str, Any] = {}
            for _ in range(count):
                name = header.text()
                if name in fields:
                    _fail(path, "each field once", f"{name!r} twice", again)
                fields[name] = header.value(header.number("I"))
            entries = [header.tensor() for _ in range(tensors)]
            align = fields.get("general.alignment", 32)
            if type(align) is not int or align < 1:
                _fail(path, "general.alignment of at least 1", repr(align), again)
            start = -(-file.tell() // align) * align
    except OSError as error:
        _fail(path, "a readable file", error.strerror or str(error), "check its permissions")
    stored: dict[str, Stored] = {}
    for name, shape, number, offset in entries:
        if number not in set(gguf.GGMLQuantizationType):
            _fail(path, f"a type of {name!r} that gguf knows", str(number), "update it: pip install -U gguf")
        kind = gguf.GGMLQuantizationType(number)
        block, width = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            _fail(path, f"rows of {name!r} to be a multiple of {block} values", str(shape), again)
        place = ByteRange(path, start + offset, math.prod(shape) // block * width)
        if place.offset + place.length > size:
            _fail(path, f"at least {place.offset + place.length} bytes", f"{size} (truncated)", again)
        if name in stored:
            _fail(path, "each tensor once", f"{name!r} twice", again)
        stored[name] = Stored(name, shape, kind, place)
    return fields, stored


@dataclass(frozen=True, slots=True)
class _Header:
    """Takes values from the front of the file; a length that exceeds the file is refused before it is used."""

    path: Path
    file: BufferedReader
    size: int

    def take(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size else b""
        if len(data) < count:
            got = f"{self.size} bytes, the header is damaged or truncated"
            _fail(self.path, f"{count} more bytes of header", got, "fetch the file again")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        """A count of things that take at least a byte each."""
        value = self.number("Q")
        if value > self.size:
            _fail(self.path, f"a count below the file's {self.size} bytes", str(value), "fetch the file again")
        return value

    def text(self) -> str:
        # Token lists may hold broken UTF-8; they are counted here, never used.
        return self.take(self.count()).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            item, count = self.number("I"), self.count()
            if item == _TEXT:
                return [self.text() for _ in range(count)]
            if item in _NUMBERS:
                code = f"<{count}{_NUMBERS[item]}"
                return list(struct.unpack(code, self.take(struct.calcsize(code))))
            kind = item
        if kind not in _NUMBERS:
            _fail(self.path, "a field of a known type", str(kind), "fetch the file again")
        return self.number(_NUMBERS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset into the data; the file lists the fastest axis first."""
        name, axes = self.text(), self.number("I")
        if axes > 4:
            _fail(self.path, f"at most 4 axes of {name!r}", str(axes), "fetch the file again")
        shape = tuple(self.count() for _ in range(axes))[::-1]
        return name, shape, self.number("I"), self.number("Q")


def _config(path: Path, architecture: str, fields: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Any]:
    """The config.json of the model."""
    own = {name.removeprefix(f"{architecture}."): name for name in fields if name.startswith(f"{architecture}.")}
    unknown = sorted(set(own) - _FIELDS)
    if unknown:
        names = ", ".join(own[name] for name in unknown[:5])
        _fail(path, "fields of a plain model", names, "this variant is not supported: use the original checkpoint")

    def get(name: str, default: float | None = None) -> Any:
        value = fields.get(own.get(name, ""), default)
        # A list has one entry a layer; a plain config can only say what is the same for all.
        values: list[Any] = value if isinstance(value, list) and value else [value]
        if len(set(values)) != 1 or type(values[0]) not in (int, float) or not 0 < values[0] < math.inf:
            expected = f"a field {architecture}.{name} that is one positive number"
            _fail(path, expected, str(value)[:80], "the file is damaged, or of a variant that is not supported")
        return values[0]

    if fields.get(own.get("expert_count", ""), 0):
        _fail(path, "a dense model", f"{get('expert_count')} experts", "mixtures are not supported from GGUF")
    if "token_embd.weight" not in stored:
        _fail(path, "a tensor token_embd.weight", "none", "the file is incomplete")
    width, heads = get("embedding_length"), get("attention.head_count")
    head = get("attention.key_length", max(width // heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, head) != head:
            _fail(path, f"{name} {head}, the width of a head", str(get(name)), "this variant is not supported")
    scaling = fields.get(own.get("rope.scaling.type", ""), "none")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": stored["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head,
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": _decimal(get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(path, scaling, get, head, stored),
        "tie_word_embeddings": "output.weight" not in stored,
        "dtype": "float32",
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = fields.get(f"tokenizer.ggml.{theirs}_token_id")
    return config


def _rope(path: Path, kind: object, get: Callable[..., Any], head: int, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """`rope_parameters` of the config."""
    theta = _decimal(get("rope.freq_base", 10000.0))
    if kind == "linear" and "rope_freqs.weight" not in stored:
        return {"rope_type": "linear", "rope_theta": theta, "factor": _decimal(get("rope.scaling.factor"))}
    if kind != "none":
        _fail(path, "rotary scaling none, linear or of Llama 3", repr(kind), "this variant is not supported")
    if "rope_freqs.weight" not in stored:
        return {"rope_type": "default", "rope_theta": theta}
    # Llama 3.1 and later: the file holds the divisor of each frequency, transformers the rule that gives them.
    divisors = [float(value) for value in stored["rope_freqs.weight"].decode()]
    rule = {"factor": max(divisors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule |= {"original_max_position_embeddings": 8192}
    expected = _llama3_divisors(theta, head, rule) if 1 <= rule["factor"] < math.inf else []
    if len(divisors) != len(expected) or any(abs(a - b) > 1e-5 * b for a, b in zip(divisors, expected, strict=True)):
        _fail(path, f"rope_freqs.weight to follow the Llama 3 rule {rule}", "other values", "this is not supported")
    return {"rope_type": "llama3", "rope_theta": theta, **rule}


def _llama3_divisors(theta: float, head: int, rule: Mapping[str, float]) -> list[float]:
    """By what Llama 3 divides each rotary frequency: 1 for short waves, `factor` for long ones, smooth between."""
    low, high, factor = rule["low_freq_factor"], rule["high_freq_factor"], rule["factor"]
    divisors: list[float] = []
    for i in range(head // 2):
        turns = rule["original_max_position_embeddings"] * theta ** (-2 * i / head) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """GGUF name, Hugging Face name and shape of every tensor of the model."""
    vocabulary, width, inner = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    yield "token_embd.weight", "model.embed_tokens.weight", (vocabulary, width)
    for layer in range(config["num_hidden_layers"]):
        a, b = f"blk.{layer}.", f"model.layers.{layer}."
        yield f"{a}attn_norm.weight", f"{b}input_layernorm.weight", (width,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{a}attn_{name}.weight", f"{b}self_attn.{name}_proj.weight", (rows, width)
            if config["model_type"] == "qwen2":
                yield f"{a}attn_{name}.bias", f"{b}self_attn.{name}_proj.bias", (rows,)
            if config["model_type"] == "qwen3" and name != "v":
                yield f"{a}attn_{name}_norm.weight", f"{b}self_attn.{name}_norm.weight", (config["head_dim"],)
        yield f"{a}attn_output.weight", f"{b}self_attn.o_proj.weight", (width, q)
        yield f"{a}ffn_norm.weight", f"{b}post_attention_layernorm.weight", (width,)
        yield f"{a}ffn_gate.weight", f"{b}mlp.gate_proj.weight", (inner, width)
        yield f"{a}ffn_up.weight", f"{b}mlp.up_proj.weight", (inner, width)
        yield f"{a}ffn_down.weight", f"{b}mlp.down_proj.weight", (width, inner)
    yield "output_norm.weight", "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (vocabulary, width)


def _rotary_heads(config: Mapping[str, Any], name: str) -> int:
    """Heads of a tensor whose rows are stored as neighbouring rotary pairs, else 0."""
    if config["model_type"] != "llama":
        return 0
    if name.endswith(".attn_q.weight"):
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if name.endswith(".attn_k.weight") else 0


def _check_kinds(path: Path, tensors: list[Stored]) -> None:
    """Refuses quantisation types that the gguf package cannot decode, before a long operation meets them."""
    import gguf
    import numpy as np

    for tensor in {tensor.kind: tensor for tensor in tensors}.values():
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[tensor.kind][1]), dtype=np.uint8)
        try:
            gguf.dequantize(block, tensor.kind)
        except NotImplementedError as error:
            kind = tensor.kind.name
            raise CheckpointError(f"{path}: gguf cannot decode type {kind} of {tensor.name}; update gguf") from error


def _decimal(value: float) -> float:
    """The shortest decimal that is this 32-bit float: 1e-05 for 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _fail(path: Path, expected: str, got: str, do: str) -> NoReturn:
    raise CheckpointError(f"{path}: expected {expected}, got {got}; {do}")
