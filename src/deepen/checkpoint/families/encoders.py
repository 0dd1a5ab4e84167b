"""Text encoders."""

from __future__ import annotations

from deepen.checkpoint.families.shapes import POST_NORM, TINY, outputs, whole
from deepen.checkpoint.family import Family, Parts, Tower, register

BERT = whole(POST_NORM, "attention.output.dense", "output.dense", post_norm=True)

for name in "bert roberta xlm-roberta camembert".split():
    register(Family(model_type=name, towers=(Tower(name="encoder", container="encoder.layer", parts=BERT),), tiny=TINY))
register(
    Family(
        model_type="electra",
        towers=(Tower(name="encoder", container="encoder.layer", parts=BERT),),
        tiny={**TINY, "embedding_size": 32},
    ),
    Family(
        model_type="deberta-v2",
        towers=(Tower(name="encoder", container="encoder.layer", parts=BERT),),
        tiny={**TINY, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    Family(
        model_type="esm",
        towers=(
            Tower(
                name="encoder",
                container="encoder.layer",
                parts=whole("its feed-forward adds the residual itself", "attention.output.dense", "output.dense"),
            ),
        ),
        tiny={**TINY, "position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": False},
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
        tiny={
            "vocab_size": 96, "dim": 32, "n_layers": 6, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64,
        },
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
        tiny={
            **TINY, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
            "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2,
        },
    ),
)  # fmt: skip
