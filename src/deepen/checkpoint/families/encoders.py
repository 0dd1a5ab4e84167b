"""Text encoders."""

from __future__ import annotations

from typing import Any

from deepen.checkpoint.families.shapes import ADDS_ITSELF, POST_NORM, TINY, outputs, torch, whole
from deepen.checkpoint.family import Family, Parts, Slab, Tower, register

BERT = whole(POST_NORM, "attention.output.dense", "output.dense", post_norm=True)
PRE_NORM_BERT = whole(ADDS_ITSELF, "attention.output.dense", "output.dense")


def encoder(
    container: str = "encoder.layer", parts: Parts = BERT, depth: str = "num_hidden_layers", **more: Any
) -> tuple[Tower]:
    """The one tower of a text encoder."""
    return (Tower(name="encoder", container=container, depth=depth, parts=parts, **more),)


def ids(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(4, config.vocab_size, (2, tokens))}


def long_ids(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """More tokens than local windows or blocks hold."""
    return ids(config, 2 * tokens + 4)


def masked(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """One token attends globally and the last three are padding."""
    found = long_ids(config, tokens)
    mask = torch.ones_like(found["input_ids"])
    mask[1, -3:] = 0
    first = torch.zeros_like(mask)
    first[:, 0] = 1
    return {**found, "attention_mask": mask, "global_attention_mask": first}


def boxes(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Tokens with the corners of their boxes on a page."""
    corners = torch.randint(0, 30, (2, tokens, 2))
    return {**ids(config, tokens), "bbox": torch.cat([corners, corners + torch.randint(1, 30, (2, tokens, 2))], -1)}


def small_boxes(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    return {**ids(config, tokens), "bbox": torch.rand(2, tokens, 8)}


def page(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    size = config.input_size
    return {**boxes(config, tokens), "pixel_values": torch.randn(2, 3, size, size)}


def pictured(config: Any, tokens: int) -> dict[str, torch.Tensor]:
    """Tokens followed by the features of regions of a picture."""
    return {**ids(config, tokens), "visual_embeds": torch.randn(2, 5, config.visual_embedding_dim)}


# In the shape of BERT: attention and feed-forward each add the residual and normalise after it.
for name in (
    "bert roberta xlm-roberta camembert ernie data2vec-text bert-generation roc_bert splinter tapas markuplm "
    "roformer rembert"
).split():
    register(Family(model_type=name, towers=encoder(), tiny={**TINY, "type_vocab_size": 2}))
for name in "megatron-bert roberta-prelayernorm xlm-roberta-xl".split():
    register(Family(model_type=name, towers=encoder(parts=PRE_NORM_BERT), tiny=TINY))

# Few layers, each visited several times in a row: the default program of such a model is a loop.
register(
    Family(
        model_type="albert",
        towers=encoder(
            "albert_layer_groups",
            whole(POST_NORM, "albert_layers.*.attention.dense", "albert_layers.*.ffn_output", post_norm=True),
            "num_hidden_groups",
            live=("num_hidden_groups", "num_hidden_layers"),
            repeats="num_hidden_layers",
        ),
        tiny={**TINY, "embedding_size": 32, "num_hidden_groups": 6},
    )
)
DISENTANGLED = {**TINY, "relative_attention": True, "max_relative_positions": 6, "pos_att_type": ["p2c", "c2p"]}
register(
    Family(model_type="electra", towers=encoder(), tiny={**TINY, "embedding_size": 32}),
    Family(model_type="deberta-v2", towers=encoder(), tiny={**DISENTANGLED, "position_buckets": 8}),
    Family(model_type="deberta", towers=encoder(), tiny=DISENTANGLED),
    Family(
        model_type="mpnet",
        towers=encoder(parts=whole(POST_NORM, "attention.attn.o", "output.dense", post_norm=True)),
        tiny=TINY,
    ),
    Family(
        model_type="convbert", towers=encoder(),
        tiny={**TINY, "embedding_size": 32, "conv_kernel_size": 3, "head_ratio": 2}
    ),
    Family(
        model_type="fnet",
        towers=encoder(parts=whole(POST_NORM, (), "output.dense", post_norm=True)),
        tiny={**TINY, "use_tpu_fourier_optimizations": False},
    ),
    Family(
        model_type="mobilebert",
        towers=encoder(
            parts=whole(POST_NORM, "attention.output.dense", "output.bottleneck.dense", post_norm=True)
        ),
        tiny={
            **TINY, "embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16,
            "num_feedforward_networks": 2,
        },
    ),
    Family(
        model_type="longformer", towers=encoder(), inputs=masked,
        tiny={**TINY, "attention_window": [4, 8, 4, 4, 8, 4], "sep_token_id": 2},
    ),
    Family(
        model_type="big_bird", towers=encoder(), inputs=long_ids,
        tiny={**TINY, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1, "sep_token_id": 3},
    ),
    Family(
        model_type="nystromformer", towers=encoder(),
        tiny={**TINY, "segment_means_seq_len": 14, "num_landmarks": 7, "conv_kernel_size": 3},
    ),
    Family(model_type="yoso", towers=encoder(), tiny=TINY),
    Family(model_type="xmod", towers=encoder(), tiny={**TINY, "languages": ["en", "de"], "default_language": "de"}),
    Family(model_type="layoutlm", towers=encoder(), inputs=boxes, tiny={**TINY, "max_2d_position_embeddings": 64}),
    Family(
        model_type="layoutlmv3", towers=encoder(), inputs=page,
        tiny={
            **TINY, "max_2d_position_embeddings": 64, "coordinate_size": 5, "shape_size": 6, "input_size": 16,
            "patch_size": 8, "rel_pos_bins": 8, "max_rel_pos": 16, "rel_2d_pos_bins": 8, "max_rel_2d_pos": 32,
        },
    ),
    Family(model_type="bros", towers=encoder(), inputs=small_boxes, tiny={**TINY, "hidden_size": 64}),
    Family(model_type="visual_bert", towers=encoder(), inputs=pictured, tiny={**TINY, "visual_embedding_dim": 8}),
    Family(
        model_type="esm",
        towers=encoder(
            parts=whole("its feed-forward adds the residual itself", "attention.output.dense", "output.dense"),
            slabs=(Slab(name="contact_head.regression.weight", axis=1, reads=True),),
        ),
        tiny={**TINY, "position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": False},
    ),
    Family(
        model_type="distilbert",
        towers=encoder(
            "transformer.layer",
            whole(POST_NORM, "attention.out_lin", "ffn.lin2", post_norm=True),
            "n_layers",
        ),
        tiny={
            "vocab_size": 96, "dim": 32, "n_layers": 6, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64,
        },
    ),
    Family(
        model_type="modernbert",
        towers=encoder("layers", Parts(mixer=("attn",), outputs=outputs("attn.Wo", "mlp.Wo"))),
        tiny={
            **TINY, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
            "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2,
        },
    ),
    Family(model_type="eurobert", towers=encoder("layers", Parts()), tiny=TINY),
    Family(model_type="ultrabert", towers=encoder("layers", Parts()), tiny=TINY),
    Family(model_type="esmc", towers=encoder("layers", Parts()), tiny={**TINY, "num_key_value_heads": 4}),
    Family(
        model_type="clip_text_model",
        towers=encoder("encoder.layers", Parts(outputs=outputs("self_attn.out_proj", "mlp.fc2"))),
        tiny=TINY,
    ),
)  # fmt: skip

# Files name the layers of these as the code they came from did.
for name in "nomic_bert jina_embeddings_v3 gte".split():
    register(
        Family(
            model_type=name,
            towers=encoder(
                "layers",
                whole(
                    POST_NORM,
                    ("self_attn.o_proj", "attn.out_proj", "mixer.out_proj", "attention.o_proj"),
                    ("mlp.down_proj", "mlp.fc2"),
                    post_norm=True,
                ),
                on_disk=("encoder.layers", "encoder.layer", "new.encoder.layer"),
            ),
            tiny=TINY,
        )
    )
