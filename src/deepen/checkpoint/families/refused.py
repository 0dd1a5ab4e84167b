"""Model types that were looked at and left out, with the reason a user gets."""

from __future__ import annotations

from deepen.checkpoint.family import refuse

STAGES = "its layers stand in stages of different widths, so no layer fits the place of one of another stage"
CARRIES = "a layer hands more than the stream to the next one, and a program forks and joins the stream only"

refuse(
    {
        "zamba": "layers share weights by their position, which a program changes",
        "zamba2": "layers share weights and pick adapters by their position, which a program changes",
        "rwkv": "the files hold weights divided by the number of the layer, and its state is one tensor for all layers",
        "recurrent_gemma": "a layer keeps its state inside itself and not in a cache, so visits of one layer would mix",
        "xlstm": "its states are kept by layer number outside the cache, so visits of one layer would mix",
        "longcat_flash": "a layer fills two entries of the cache, and a visit has one slot",
        "zaya": CARRIES,
        "glm_moe_dsa": CARRIES,
        "hy_v4": CARRIES,
        "funnel": "it pools the sequence between its blocks, so no layer fits the place of one of another block",
        "swin": STAGES,
        "swinv2": STAGES,
        "swin2sr": STAGES,
        "donut-swin": STAGES,
        "maskformer-swin": STAGES,
        "hiera": STAGES,
        "convnext": STAGES,
        "convnextv2": STAGES,
        "cvt": STAGES,
        "pvt": STAGES,
        "pvt_v2": STAGES,
        "segformer": STAGES,
        "resnet": STAGES,
        "regnet": STAGES,
        "efficientnet": STAGES,
        "mobilevit": STAGES,
        "focalnet": STAGES,
    }
)
