"""What stands before and after the layers: ids, patches of images and series as inputs, ids and classes as outputs.

    tokens      [b, t]           -> embedding                                    [b, t, d]
    patches     [b, c, h, w]     -> squares of p x p pixels, row by row, a map   [b, (h / p) (w / p), d]
    series      [b, c, t]        -> pieces of p points, a map                    [b, ceil(t / p), d]

    stream [b, t, d] -> map -> [b, t, vocabulary]           tokens
                     -> mean or last position -> map -> [b, classes]

Patches: Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929, which reads a class token, not the mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from deepen.errors import UsageError

if TYPE_CHECKING:
    from deepen.stack.config import StackConfig


class Patches(nn.Linear):
    """Squares of an image, each mapped to the width.

    Args:
        image: channels, height and width.
        patch: p, in pixels.
        width: D.
    """

    def __init__(self, image: tuple[int, int, int], patch: int, width: int) -> None:
        super().__init__(image[0] * patch**2, width, bias=False)
        self.image, self.patch = image, patch

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.shape[1:] != self.image:
            raise UsageError(f"the stack reads images of {self.image}, got {tuple(input.shape[1:])}")
        return super().forward(F.unfold(input, self.patch, stride=self.patch).transpose(1, 2))


class Pieces(nn.Linear):
    """Pieces of a series, each mapped to the width; the last one ends with zeros where it is too short.

    Args:
        channels: of the series.
        patch: p, in points.
        width: D.
    """

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__(channels * patch, width, bias=False)
        self.channels, self.patch = channels, patch

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.ndim != 3 or input.shape[1] != self.channels:
            raise UsageError(f"the stack reads series of {self.channels} channels, got {tuple(input.shape[1:])}")
        padded = F.pad(input, (0, -input.shape[2] % self.patch))
        pieces = padded.unflatten(2, (-1, self.patch)).transpose(1, 2)
        return super().forward(pieces.flatten(2))


def make_input(config: StackConfig) -> Any:
    """The module that makes a stream of the inputs; all have a matrix `weight`."""
    if config.input == "patches":
        assert config.image is not None
        return Patches(config.image, config.patch, config.width)
    if config.input == "series":
        return Pieces(config.channels, config.patch, config.width)
    return nn.Embedding(config.vocabulary, config.width)


def make_head(config: StackConfig) -> nn.Linear:
    """The map from the stream, or what is pooled of it, to what is predicted."""
    wide = config.classes if config.output == "classes" else config.vocabulary
    return nn.Linear(config.width, wide or 0, bias=False)


def pooled(config: StackConfig, stream: torch.Tensor) -> torch.Tensor:
    """What the head reads of a stream [b, t, d]: all of it, or for classes [b, d]."""
    if config.output == "tokens":
        return stream
    return stream.mean(1) if config.pool == "mean" else stream[:, -1]


def positions_of(config: StackConfig) -> int | None:
    """How many positions an input has; None where inputs may differ."""
    if config.input != "patches" or config.image is None:
        return None
    return (config.image[1] // config.patch) * (config.image[2] // config.patch)


def require_ends(config: StackConfig) -> None:
    """Refuses inputs and outputs that do not fit together.

    Raises:
        ValueError: says what is missing or too much.
    """
    if config.input == "patches":
        if config.image is None:
            raise ValueError("input: patches needs image: [channels, height, width]")
        if any(size % config.patch for size in config.image[1:]):
            raise ValueError(
                f"an image of {config.image[1]} x {config.image[2]} has no whole patches of {config.patch}; "
                "choose a divisor of both"
            )
    if (config.output == "classes") != (config.classes is not None):
        raise ValueError("output: classes needs the number of classes, and nothing else does")
    if config.output == "tokens" and config.input != "tokens":
        raise ValueError(f"input: {config.input} has no tokens to predict; give output: classes")
    if config.tied and (config.input, config.output) != ("tokens", "tokens"):
        raise ValueError("tied is about tokens as input and output; leave it out")
    if config.grams and config.input != "tokens":
        raise ValueError(f"grams are of tokens, and input: {config.input} has none; leave grams out")
    if any(n < 2 for n in config.grams) or len(set(config.grams)) < len(config.grams):
        raise ValueError(f"grams: got {list(config.grams)}, expected lengths of 2 or more, each once")
    count = positions_of(config)
    if config.positions == "learned" and count is not None and count > config.context:
        raise ValueError(f"an image has {count} patches, more than a context of {config.context}")


def untied(data: Any) -> Any:
    """The fields of a configuration, of which other ends than tokens have no shared matrix unless they say so."""
    if isinstance(data, dict) and {data.get("input", "tokens"), data.get("output", "tokens")} != {"tokens"}:
        return {"tied": False, **data}
    return data
