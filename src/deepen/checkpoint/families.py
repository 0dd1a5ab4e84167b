"""The table of families. Adding one is a few lines here and a tiny config in `tiny.py`; the parity suite checks it."""

from __future__ import annotations

from deepen.checkpoint.family import Family, Parts, Tower, register


def outputs(mixer: tuple[str, ...] | str, feed_forward: tuple[str, ...] | str) -> dict[str, tuple[str, ...]]:
    as_tuple = lambda value: (value,) if isinstance(value, str) else value  # noqa: E731
    return {"a": as_tuple(mixer), "f": as_tuple(feed_forward)}


def whole(reason: str, mixer: str, feed_forward: str, *, post_norm: bool = False) -> Parts:
    return Parts(kind="whole", outputs=outputs(mixer, feed_forward), post_norm=post_norm, reason=reason)


def text(container: str = "layers", depth: str = "num_hidden_layers", parts: Parts = Parts(), **more) -> Tower:
    return Tower(name="text", container=container, depth=depth, caches=True, parts=parts, **more)


# Pre-norm decoders in the shape of Llama: x + self_attn(norm x), then x + mlp(norm x).
for name in (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 olmo olmo2 olmo3 granite smollm3 helium glm glm4 arcee "
    "ministral seed_oss exaone4 nemotron ernie4_5 hunyuan_v1_dense"
).split():
    register(Family(model_type=name, towers=(text(),)))

# The same with a mixture of experts as the feed-forward: every expert writes to the stream.
# Patterns cover both the stacked tensors of the module and the single experts of the files.
moe = Parts(
    outputs=outputs(
        "self_attn.o_proj",
        (
            "mlp.down_proj",
            "mlp.experts.down_proj",
            "mlp.experts.*.down_proj",
            "mlp.shared_expert.down_proj",
            "mlp.shared_experts.down_proj",
            "block_sparse_moe.experts.*.w2",
        ),
    )
)
for name in "mixtral qwen2_moe qwen3_moe olmoe deepseek_v2 deepseek_v3 dots1".split():
    register(Family(model_type=name, towers=(text(parts=moe),)))

register(
    Family(
        model_type="starcoder2",
        towers=(text(parts=Parts(outputs=outputs("self_attn.o_proj", "mlp.c_proj"))),),
    ),
    Family(model_type="cohere", towers=(text(parts=Parts(kind="parallel")),)),
    Family(model_type="cohere2", towers=(text(parts=Parts(kind="parallel")),)),
    Family(model_type="stablelm", towers=(text(),)),
    Family(
        model_type="phi",
        towers=(text(parts=Parts(kind="parallel", outputs=outputs("self_attn.dense", "mlp.fc2"))),),
    ),
    Family(
        model_type="persimmon",
        towers=(text(parts=Parts(outputs=outputs("self_attn.dense", "mlp.dense_4h_to_h"))),),
    ),
    Family(
        model_type="gpt_neox",
        towers=(
            text(
                parts=Parts(
                    kind="parallel",
                    mixer=("attention",),
                    outputs=outputs("attention.dense", "mlp.dense_4h_to_h"),
                )
            ),
        ),
    ),
    Family(
        model_type="gpt2",
        towers=(
            text(
                "h",
                "n_layer",
                Parts(mixer=("attn",), outputs=outputs("attn.c_proj", "mlp.c_proj")),
            ),
        ),
        folds_index={"scale_attn_by_inverse_layer_idx": "attn.c_attn"},
    ),
    Family(
        model_type="gptj",
        towers=(
            text(
                "h",
                "n_layer",
                Parts(kind="parallel", mixer=("attn",), outputs=outputs("attn.out_proj", "mlp.fc_out")),
            ),
        ),
    ),
    Family(
        model_type="gpt_neo",
        towers=(
            text(
                "h",
                "num_layers",
                Parts(mixer=("attn",), outputs=outputs("attn.attention.out_proj", "mlp.c_proj")),
            ),
        ),
        fields={"attention_layers": "list", "attention_types": "grouped_list"},
    ),
    Family(
        model_type="bloom",
        towers=(
            text(
                "h",
                "n_layer",
                whole(
                    "its attention and feed-forward add the residual themselves",
                    "self_attention.dense",
                    "mlp.dense_4h_to_h",
                ),
            ),
        ),
    ),
    Family(
        model_type="falcon",
        towers=(
            text(
                "h",
                parts=Parts(
                    kind="parallel",
                    mixer=("self_attention",),
                    outputs=outputs("self_attention.dense", "mlp.dense_4h_to_h"),
                ),
            ),
        ),
    ),
    Family(
        model_type="opt",
        towers=(
            text(
                parts=whole("its layer has no feed-forward module, only fc1 and fc2", "self_attn.out_proj", "fc2"),
            ),
        ),
    ),
)

mamba = Parts(kind="single", mixer=("mixer",), feed_forward=(), outputs={"a": ("mixer.out_proj",), "f": ()})
for name in "mamba mamba2 falcon_mamba".split():
    register(Family(model_type=name, towers=(text(parts=mamba),)))

register(
    Family(
        model_type="jamba",
        towers=(
            text(
                parts=Parts(
                    mixer=("self_attn", "mamba"),
                    feed_forward=("feed_forward",),
                    outputs=outputs(
                        ("self_attn.o_proj", "mamba.out_proj"),
                        (
                            "feed_forward.down_proj",
                            "feed_forward.experts.down_proj",
                            "feed_forward.experts.*.down_proj",
                        ),
                    ),
                )
            ),
        ),
    ),
)

# Encoders whose layer normalises after each addition: it is never x plus something.
POST_NORM = "it normalises after the addition, so a part alone is not the layer without the other"
bert = whole(POST_NORM, "attention.output.dense", "output.dense", post_norm=True)
for name in "bert roberta xlm-roberta electra camembert".split():
    register(
        Family(model_type=name, towers=(Tower(name="encoder", container="encoder.layer", parts=bert),)),
    )
register(
    Family(
        model_type="esm",
        towers=(
            Tower(
                name="encoder",
                container="encoder.layer",
                parts=whole("its feed-forward adds the residual itself", "attention.output.dense", "output.dense"),
            ),
        ),
    ),
    Family(
        model_type="distilbert",
        towers=(
            Tower(
                name="encoder",
                container="transformer.layer",
                depth="n_layers",
                parts=whole(POST_NORM, "attention.out_lin", "ffn.lin2", post_norm=True),
            ),
        ),
    ),
    Family(
        model_type="deberta-v2",
        towers=(Tower(name="encoder", container="encoder.layer", parts=bert),),
    ),
    Family(
        model_type="modernbert",
        towers=(
            Tower(
                name="encoder",
                container="layers",
                parts=Parts(mixer=("attn",), outputs=outputs("attn.Wo", "mlp.Wo")),
            ),
        ),
    ),
)

# Encoder-decoders: two towers, each with its own depth.
BIAS = "layer.0.SelfAttention.relative_attention_bias.weight"
for name in "t5 mt5".split():
    register(
        Family(
            model_type=name,
            towers=(
                Tower(
                    name="encoder",
                    container="encoder.block",
                    depth="num_layers",
                    first=(BIAS,),
                    parts=whole(
                        "its sublayers add the residual themselves",
                        "layer.0.SelfAttention.o",
                        "layer.1.DenseReluDense.wo",
                    ),
                ),
                Tower(
                    name="decoder",
                    container="decoder.block",
                    depth="num_decoder_layers",
                    live=("num_layers", "num_decoder_layers"),
                    caches=True,
                    first=(BIAS,),
                    parts=Parts(
                        kind="whole",
                        outputs=outputs(
                            ("layer.0.SelfAttention.o", "layer.1.EncDecAttention.o"), "layer.2.DenseReluDense.wo"
                        ),
                        reason="its sublayers add the residual themselves",
                    ),
                ),
            ),
        ),
    )


def encoder_decoder(model_type: str, *, post_norm: bool) -> Family:
    no_module = "its layer has no feed-forward module, only fc1 and fc2"
    decoder = Parts(
        kind="whole",
        outputs=outputs(("self_attn.out_proj", "encoder_attn.out_proj"), "fc2"),
        post_norm=post_norm,
        reason=no_module,
    )
    return Family(
        model_type=model_type,
        towers=(
            Tower(
                name="encoder",
                container="encoder.layers",
                depth="encoder_layers",
                parts=whole(no_module, "self_attn.out_proj", "fc2", post_norm=post_norm),
            ),
            Tower(name="decoder", container="decoder.layers", depth="decoder_layers", caches=True, parts=decoder),
        ),
    )


for name in "bart marian blenderbot-small".split():
    register(encoder_decoder(name, post_norm=True))
for name in "pegasus mbart m2m_100 blenderbot whisper".split():
    register(encoder_decoder(name, post_norm=False))

# Vision and audio encoders.
for name in "vit deit".split():
    register(
        Family(
            model_type=name,
            towers=(
                Tower(
                    name="vision",
                    container="layers",
                    on_disk="encoder.layer",
                    parts=Parts(
                        mixer=("attention",),
                        outputs=outputs(("attention.o_proj", "attention.output.dense"), ("mlp.fc2", "output.dense")),
                    ),
                ),
            ),
        ),
    )
register(
    Family(
        model_type="dinov2",
        towers=(
            Tower(
                name="vision",
                container="encoder.layer",
                parts=Parts(
                    mixer=("attention",),
                    outputs=outputs(("attention.o_proj", "attention.output.dense"), ("mlp.fc2", "mlp.weights_out")),
                ),
            ),
        ),
    ),
)
for name in "clip_vision_model siglip_vision_model".split():
    register(
        Family(
            model_type=name,
            towers=(
                Tower(
                    name="vision",
                    container="encoder.layers",
                    parts=Parts(outputs=outputs("self_attn.out_proj", "mlp.fc2")),
                ),
            ),
        ),
    )
for name in "wav2vec2 hubert".split():
    register(
        Family(
            model_type=name,
            towers=(
                Tower(
                    name="audio",
                    container="encoder.layers",
                    parts=whole(POST_NORM, "attention.out_proj", "feed_forward.output_dense", post_norm=True),
                ),
            ),
        ),
    )
