"""What a run trains: every weight, those of chosen layers, parameters by pattern, or LoRA beside the matrices.

    LoRA    y = W x + (alpha / r) B A x        A random, B = 0: at first the model is the one before, bit for bit

Parameters that are not chosen require no gradient and are in no group of the optimiser, so neither weight decay nor
momentum moves them.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from deepen.checkpoint.experts import Experts
from deepen.checkpoint.owned_maps import OWNED
from deepen.checkpoint.visit import VisitList
from deepen.errors import UsageError, nearest
from deepen.registry import method
from deepen.train.selective.block import TURNED

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedModel

# Families whose kernels read the weights of some projections without calling their modules.
BYPASSED = ("mamba", "mamba2", "falcon_mamba", "falcon_h1")


def select(model: nn.Module, patterns: Iterable[str]) -> None:
    """Leaves trainable only the parameters whose names match one of the patterns, with `*` and `?`.

    Raises:
        UsageError: a pattern that matches no parameter.
    """
    patterns = tuple(patterns)
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise UsageError(f"no parameter is called {pattern!r}{nearest(pattern, parameters)}; * stands for anything")
    for name, parameter in parameters.items():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))


def select_layers(model: PreTrainedModel, layers: Sequence[int | str], tower: str) -> None:
    """Leaves trainable only the parameters of some layers.

    Args:
        model: a model that `Checkpoint.load` gave.
        layers: layers of the bank, as the program names them, with all their copies; or single copies, such as `3!1`.
        tower: the tower they are in.

    Raises:
        UsageError: a layer that the program does not visit.
    """
    select(model, [f"{prefix}*" for prefix in layer_prefixes(model, tower, layers)])


def select_owned(model: PreTrainedModel) -> None:
    """Leaves trainable only the parameters that the program owns beside its layers: adapters of turns, gates ..."""
    select(model, [f"*.{OWNED}.*"])


def layer_prefixes(model: PreTrainedModel, tower: str, layers: Sequence[int | str] = ()) -> list[str]:
    """What the names of the parameters of these layers begin with; of all layers when none is named.

    Raises:
        UsageError: a layer that the program does not visit.
    """
    found = {
        f"{path}.{child}.": key
        for path, visits in model.named_modules()
        if isinstance(visits, VisitList) and visits.tower.name == tower
        for child, key in enumerate(visits.plan.keys)
    }
    numbers = {key.layer for key in found.values()}
    copies = {f"{key}": key for key in sorted(found.values(), key=str) if key.copy is not None}
    if missing := [f"{name}" for name in dict.fromkeys(layers) if name not in numbers and name not in copies]:
        raise UsageError(
            f"--layers: the program visits no layer {', '.join(missing)}; it visits "
            f"{', '.join([*map(str, sorted(numbers)), *copies])}"
        )
    return [prefix for prefix, key in found.items() if not layers or key.layer in layers or str(key) in layers]


@method(
    "lora",
    family="train",
    source="arXiv:2106.09685",
    title="LoRA: Low-Rank Adaptation of Large Language Models",
    mechanism="train a product of two thin matrices beside each matrix: W x + (alpha / r) B A x, B = 0 at first",
    cost="r (in + out) parameters a matrix, none after merging",
)
def add_lora(model: PreTrainedModel, rank: int, tower: str, layers: Sequence[int | str] = ()) -> Any:
    """Puts adapters beside the matrices of these layers, and leaves only the adapters trainable.

    The layers of `model` itself are changed, so `model` runs with the adapters. Left out: experts, which are no
    linear layers; in models that have some, dense feed-forwards of the same names; and two projections of Mamba.

    Args:
        model: a model that `Checkpoint.load` gave.
        rank: r; alpha is twice as large.
        tower: the tower of the layers.
        layers: layers of the bank, or single copies such as `3!1`; all when none is named.

    Returns:
        PEFT's view of the model, which can merge, unload and save them.

    Raises:
        UsageError: peft is not installed, a rank out of range, or a layer that the program does not visit.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageError("--mode lora needs peft: install deepen[peft], or use --mode full") from error
    matrices = _matrices(model, layer_prefixes(model, tower, layers))
    if not matrices:
        raise UsageError("--mode lora: these layers hold no linear matrix; use --mode full or --mode layers")
    shapes = {name: min(module.weight.shape) for name, module in matrices.items()}
    name, least = min(shapes.items(), key=lambda item: item[1])
    if not 1 <= rank <= least:
        raise UsageError(f"--rank {rank}: expected 1 to {least}, the smaller side of the smallest matrix, {name}")
    turned = any(type(module).__name__ == TURNED for module in matrices.values())
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=sorted(matrices), fan_in_fan_out=turned
    )
    with warnings.catch_warnings():
        # of peft's own call, which this version of transformers has renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        made = get_peft_model(model, config)
    adapted = {name.split(".lora_")[0] for name, each in model.named_parameters() if each.requires_grad}
    assert adapted == set(matrices), adapted ^ set(matrices)
    return made


def linears(model: PreTrainedModel, prefixes: Sequence[str]) -> dict[str, Any]:
    """The linear layers whose names begin so and whose forward is called, by name; experts call none of theirs."""
    found = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == TURNED) and name.startswith(tuple(prefixes))
    }
    split = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Experts))
    found = {name: module for name, module in found.items() if not name.startswith(split)}
    if model.config.model_type in BYPASSED:
        found = {name: module for name, module in found.items() if not name.endswith((".out_proj", ".dt_proj"))}
    return found


def _matrices(model: PreTrainedModel, prefixes: Sequence[str]) -> dict[str, Any]:
    """The linear layers that an adapter can stand beside, by name."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    found = linears(model, prefixes)
    # In models with experts peft takes a dense feed-forward of the same name for an old name of the experts.
    names = LoraConfig(target_modules=list(found))
    convert_peft_config_for_transformers(names, model, None)
    return {name: module for name, module in found.items() if name in (names.target_modules or ())}
