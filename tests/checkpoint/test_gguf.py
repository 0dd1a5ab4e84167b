"""GGUF files read as the models they were made from: same tensors, same config, same logits; the rest is refused."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deepen.checkpoint.gguf import gguf_tokenizer, open_gguf, read_gguf_header
from deepen.checkpoint.recipes import Cast, Copy, Recipe
from deepen.checkpoint.sources import TensorInfo, open_safetensors
from deepen.checkpoint.writer import write_weights
from deepen.errors import CheckpointError

sys.path.insert(0, str(Path(__file__).parents[1]))
import assets

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}  # fmt: skip
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    """A random model of the family whose every parameter matters."""
    torch.manual_seed(0)
    sizes = {**SIZES, **changes}
    if kind == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As the converter of llama.cpp stores q and k."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    change: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    drop: str = "",
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    arch: str | None = None,
) -> Path:
    """Writes the model with the gguf package; names come from its own table."""
    config = model.config
    kind = config.model_type
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch or kind)
    fields = {
        "block_count": lambda: writer.add_block_count(config.num_hidden_layers),
        "context_length": lambda: writer.add_context_length(config.max_position_embeddings),
        "embedding_length": lambda: writer.add_embedding_length(config.hidden_size),
        "feed_forward_length": lambda: writer.add_feed_forward_length(config.intermediate_size),
        "head_count": lambda: writer.add_head_count(config.num_attention_heads),
        "head_count_kv": lambda: writer.add_head_count_kv(config.num_key_value_heads),
        "rms": lambda: writer.add_layer_norm_rms_eps(config.rms_norm_eps),
        "freq_base": lambda: writer.add_rope_freq_base(config.rope_parameters["rope_theta"]),
        "key_length": lambda: kind == "qwen3" and writer.add_key_length(config.head_dim),
        "value_length": lambda: kind == "qwen3" and writer.add_value_length(config.head_dim),
        "name": lambda: writer.add_name("Tiny"),
        "bos": lambda: writer.add_bos_token_id(1),
        "eos": lambda: writer.add_eos_token_id(2),
    }
    for name, add in fields.items():
        if name != drop:
            add()
    change(writer)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        theirs = f"{names.get_name(stem)}.{suffix}"
        values = tensor.numpy()
        if kind == "llama" and ".q_proj" in name:
            values = permuted(values, config.num_attention_heads)
        if kind == "llama" and ".k_proj" in name:
            values = permuted(values, config.num_key_value_heads)
        if theirs == drop:
            continue
        found = (kinds or {}).get(theirs)
        if found is None:
            writer.add_tensor(theirs, values)
        else:
            writer.add_tensor(theirs, gguf.quantize(values, found), raw_dtype=found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rebuilt(path: Path, cls: type[PreTrainedModel]) -> PreTrainedModel:
    config, source = open_gguf(path)
    assert cls.config_class is not None
    model = cls(cls.config_class(**config))
    state = {name: source.read(name) for name in source.infos}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_comes_back_as_it_was(tmp_path: Path, kind: str, tied: bool) -> None:
    model = tiny(kind, tie_word_embeddings=tied)
    path = write(tmp_path / "x.gguf", model)
    config, source = open_gguf(path)
    assert ("lm_head.weight" in source.infos) is not tied
    for name, info in source.infos.items():
        got, expected = source.read(name), model.state_dict()[name]
        assert source.range(name) is None
        assert info == TensorInfo("F32", tuple(expected.shape))
        assert got.dtype == torch.float32
        assert torch.equal(got, expected), name
    ids = torch.arange(20)[None] % 40
    assert torch.equal(rebuilt(path, type(model))(ids).logits, model(ids).logits)
    theirs, ours = model.config.to_dict(), type(model.config)(**config).to_dict()
    # The head width of Qwen2 is a quotient there, and spelled out here.
    assert ours.pop("head_dim") == theirs.pop("head_dim", 8)
    for field in ("architectures", "dtype", "transformers_version"):
        theirs.pop(field, None)
        ours.pop(field, None)
    assert ours == theirs
    assert config["architectures"] == [type(model).__name__]
    assert source.files == (path,)
    assert source.metadata["general.name"] == "Tiny"


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_reads_the_same(tmp_path: Path, kind: str) -> None:
    model = tiny(kind)
    path = write(tmp_path / "x.gguf", model, change=lambda w: w.add_vocab_size(40))
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="x.gguf")
    config = open_gguf(path)[0]
    for field, value in config.items():
        if field not in ("architectures", "dtype", "head_dim", "pad_token_id"):
            found = getattr(theirs, field)
            assert (np.float32(found) if isinstance(value, float) else found) == (
                np.float32(value) if isinstance(value, float) else value
            ), field
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    for name, tensor in rebuilt(path, type(model)).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_tensors_are_decoded_as_the_package_does(tmp_path: Path, kind: str) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    model = tiny("llama")
    names = ("blk.1.ffn_down.weight", "blk.0.attn_q.weight", "blk.1.attn_k.weight", "token_embd.weight")
    path = write(tmp_path / "x.gguf", model, kinds=dict.fromkeys(names, quant))
    source = open_gguf(path)[1]
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for theirs, ours in (
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ):
        assert stored[theirs].tensor_type == quant
        assert torch.equal(source.read(ours), torch.tensor(gguf.dequantize(stored[theirs].data, quant)))
    for ours in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        original = model.state_dict()[ours]
        # Rows put back wrongly would differ by whole values, not by rounding.
        assert (source.read(ours) - original).abs().max() < 0.1
        assert not torch.equal(source.read(ours), original)


def test_the_header_agrees_with_the_package(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "ä", ""])
        writer.add_token_types([1, 3, 6])
        writer.add_array("test.floats", [0.5, 1.5])
        writer.add_array("test.flags", [True, False])
        for kind, value in (("uint8", 255), ("int8", -1), ("uint16", 65535), ("int16", -2), ("int32", -3)):
            getattr(writer, f"add_{kind}")(f"test.{kind}", value)
        writer.add_uint64("test.uint64", 2**63)
        writer.add_int64("test.int64", -(2**62))
        writer.add_float64("test.float64", 0.1)
        writer.add_bool("test.bool", True)

    path = write(tmp_path / "x.gguf", tiny("llama"), change=change)
    fields, stored = read_gguf_header(path)
    reader = gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == theirs
    assert {
        name: (tensor.shape[::-1], tensor.place.offset, tensor.place.length) for name, tensor in stored.items()
    } == {tensor.name: (tuple(tensor.shape), tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors}


def test_read_owns_its_memory(tmp_path: Path) -> None:
    source = open_gguf(write(tmp_path / "x.gguf", tiny("llama")))[1]
    first = source.read("model.norm.weight")
    expected = first.clone()
    first.zero_()
    assert torch.equal(source.read("model.norm.weight"), expected)
    with pytest.raises(CheckpointError, match=r"no tensor 'model.norm' \(did you mean 'model.norm.weight'"):
        source.read("model.norm")
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        source.range("x")


def test_a_gguf_can_be_written_as_safetensors(tmp_path: Path) -> None:
    config, source = open_gguf(write(tmp_path / "x.gguf", tiny("llama")))
    out = tmp_path / "out"
    out.mkdir()
    recipes: dict[str, Recipe] = {name: Cast(Copy(name, info), "BF16") for name, info in source.infos.items()}
    write_weights(out, recipes, source)
    LlamaConfig(**config).save_pretrained(out)
    loaded = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, source.read(name).bfloat16())
    assert open_safetensors(out).infos["model.norm.weight"].dtype == "BF16"


def test_linear_and_llama3_rotary_scaling(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    model = tiny("llama", rope_parameters=rope)
    path = write(tmp_path / "linear.gguf", model, change=linear)
    assert open_gguf(path)[0]["rope_parameters"] == rope
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    model = tiny("llama", head_dim=64, rope_parameters=rope)
    frequencies = 5e5 ** (-torch.arange(0, 64, 2).float() / 64)
    # transformers' own rule, as the divisor of each frequency.
    divisors = (frequencies / model.model.rotary_emb.inv_freq).numpy().round(5)
    assert divisors.min() == 1
    assert divisors.max() == 8

    def llama3(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(64)
        writer.add_tensor("rope_freqs.weight", divisors)

    path = write(tmp_path / "llama3.gguf", model, change=llama3)
    assert open_gguf(path)[0]["rope_parameters"] == rope
    ids = torch.arange(20)[None] % 40
    assert torch.equal(rebuilt(path, LlamaForCausalLM)(ids).logits, model(ids).logits)
    divisors[20] *= 1.01
    with pytest.raises(CheckpointError, match="Llama 3 rule"):
        open_gguf(write(tmp_path / "other.gguf", model, change=llama3))
    both = lambda writer: (linear(writer), llama3(writer))  # noqa: E731
    with pytest.raises(CheckpointError, match="rotary scaling none, linear or of Llama 3"):
        open_gguf(write(tmp_path / "both.gguf", model, change=both))


CHANGES: dict[str, tuple[Callable[[gguf.GGUFWriter], object], str]] = {
    "experts": (lambda w: w.add_expert_count(8), "a dense model, got 8 experts"),
    "window": (lambda w: w.add_sliding_window(64), "got llama.attention.sliding_window"),
    "yarn": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "got 'yarn'"),
    "partial rotary": (lambda w: w.add_rope_dimension_count(4), "rope.dimension_count 8, the width of a head, got 4"),
    "value width": (lambda w: w.add_value_length(4), "attention.value_length 8, the width of a head, got 4"),
    "extra tensor": (lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(32, np.float32)), "got blk.0.attn_q.bias"),
    "part": (lambda w: w.add_uint16("split.count", 3), "got a part of 3; join them"),
    "head width": (lambda w: w.add_key_length(16), "blk.0.attn_q.weight of shape (64, 32)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_the_model_is_refused(tmp_path: Path, change: str) -> None:
    add, message = CHANGES[change]
    path = write(tmp_path / "x.gguf", tiny("llama"), change=add)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("block_count", "llama.block_count that is one positive number, got None"),
        ("rms", "llama.attention.layer_norm_rms_epsilon"),
        ("token_embd.weight", "a tensor token_embd.weight, got none"),
        ("blk.1.ffn_up.weight", "a tensor blk.1.ffn_up.weight, got none"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, drop: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_gguf(write(tmp_path / "x.gguf", tiny("llama"), drop=drop))


@pytest.mark.parametrize("value", [[4, 2], "4", 0, -1, float("nan")], ids=str)
def test_a_field_that_is_no_positive_number_is_refused(tmp_path: Path, value: object) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        kind = {list: gguf.GGUFValueType.ARRAY, str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32}
        writer.add_key_value("llama.attention.head_count", value, kind.get(type(value), gguf.GGUFValueType.INT32))

    with pytest.raises(CheckpointError, match=r"llama.attention.head_count that is one positive number"):
        open_gguf(write(tmp_path / "x.gguf", tiny("llama"), change=change, drop="head_count"))


def test_equal_lists_and_defaults_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny("llama"), change=lambda w: w.add_head_count([4, 4]), drop="head_count")
    assert open_gguf(path)[0]["num_attention_heads"] == 4
    path = write(tmp_path / "y.gguf", tiny("llama", num_key_value_heads=4), drop="head_count_kv")
    assert open_gguf(path)[0]["num_key_value_heads"] == 4
    path = write(tmp_path / "z.gguf", tiny("llama"), drop="freq_base")
    assert open_gguf(path)[0]["rope_parameters"]["rope_theta"] == 10000.0


def test_other_architectures_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny("llama"), arch="gemma2")
    with pytest.raises(CheckpointError, match=r"among llama, qwen2, qwen3, got 'gemma2'"):
        open_gguf(path)


def test_types_that_cannot_be_decoded_are_refused_on_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quant = gguf.GGMLQuantizationType.Q4_0
    path = write(tmp_path / "x.gguf", tiny("llama"), kinds={"blk.0.ffn_up.weight": quant})
    monkeypatch.delitem(gguf.quants._type_traits, quant)
    with pytest.raises(CheckpointError, match=r"cannot decode type Q4_0 of blk.0.ffn_up.weight; update gguf"):
        open_gguf(path)


def test_files_that_are_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for make, message in (
        (lambda: None, "got nothing"),
        (lambda: path.write_bytes(b""), "starts with GGUF, got b''"),
        (lambda: path.write_bytes(b"PK\3\4" * 9), "starts with GGUF, got b'PK"),
        (lambda: path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(99)), "version 2 or 3, little endian, got 1"),
        (lambda: path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(99)), "little endian"),
        (lambda: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0)), "a count below the file's 24 bytes"),
        (lambda: path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60)), "a count below"),
        (lambda: path.write_bytes(b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77)), "a known type, got 77"),
        (lambda: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0)), "got 'None'"),
    ):
        make()
        with pytest.raises(CheckpointError) as caught:
            open_gguf(path)
        assert message in str(caught.value)
    with pytest.raises(CheckpointError, match="got a folder"):
        open_gguf(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny("llama", num_hidden_layers=1))
    whole = path.read_bytes()
    last = max(place.place.offset + place.place.length for place in read_gguf_header(path)[1].values())
    for size in [*range(0, 3000, 7), last - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_gguf(path)
    path.write_bytes(whole[:last])
    open_gguf(path)


def test_damaged_headers_never_raise_anything_else(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny("llama", num_hidden_layers=1))
    whole = bytearray(path.read_bytes())
    start = min(place.place.offset for place in read_gguf_header(path)[1].values())
    generator = np.random.default_rng(0)
    refusals = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[generator.integers(start)] = generator.integers(256)
        path.write_bytes(damaged)
        try:
            open_gguf(path)
        except CheckpointError:
            refusals += 1
    assert refusals > 200


def test_repeated_names_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny("llama"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"general.name", b"general.type").replace(b"blk.1.ffn_up.", b"blk.0.ffn_up."))
    with pytest.raises(CheckpointError, match=r"each tensor once, got 'blk.0.ffn_up.weight' twice"):
        open_gguf(path)
    path.write_bytes(data.replace(b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id"))
    with pytest.raises(CheckpointError, match=r"each field once, got 'tokenizer.ggml.bos_token_id' twice"):
        open_gguf(path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.gguf", tiny("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'deepen\[gguf\]'"):
        open_gguf(path)


def tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "abc"]
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}!")


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(write(tmp_path / "x.gguf", tiny("llama"), change=tokens))
    assert tokenizer("abcab")["input_ids"] == [7, 6]
    assert tokenizer.decode([7, 3]) == "abca"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny("llama"))
    with pytest.raises(CheckpointError, match=r"expected a tokenizer .*, got none; give the folder"):
        gguf_tokenizer(path)

    def unknown(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("abacus")
        writer.add_token_list(["a"])

    with pytest.raises(CheckpointError, match="cannot convert its tokenizer"):
        gguf_tokenizer(write(tmp_path / "y.gguf", tiny("llama"), change=unknown))


# "The capital of France is Paris. The capital of Germany is", and what follows.
PROMPT = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 4521, 314]
TEXT = "The capital of France is Paris. The capital of Germany is"


def test_the_real_model_continues_sensibly() -> None:
    config, source = open_gguf(assets.smollm2_gguf())
    state = {name: source.read(name) for name in source.infos}
    # Skips the random initialisation that a plain constructor would spend seconds on.
    model = LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(**config), state_dict=state)
    assert model.num_parameters() == 134_515_008
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)  # pyright: ignore[reportAttributeAccessIssue]
    assert out[0, len(PROMPT) :].tolist() == [11452, 30]


@pytest.mark.slow
def test_the_real_model_is_what_transformers_reads() -> None:
    path = assets.smollm2_gguf()
    tokenizer = gguf_tokenizer(path)
    assert tokenizer(TEXT)["input_ids"] == PROMPT
    assert tokenizer.decode([11452, 30]) == " Berlin."
    assert "<|im_start|>user\nhi<|im_end|>" in str(
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    )
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = rebuilt(path, LlamaForCausalLM)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    config, expected = ours.config.to_dict(), theirs.config.to_dict()
    assert config.pop("rms_norm_eps") == np.float32(expected.pop("rms_norm_eps")) == pytest.approx(1e-5)
    extra = {"_model_name_or_path", "_name_or_path", "architectures", "quantization_config", "unk_token_id"}
    assert {key for key in config.keys() | expected.keys() if config.get(key) != expected.get(key)} <= extra
