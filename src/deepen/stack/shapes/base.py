"""What models of another shape share: configurations that state their parameters, seeds, initial values, checks.

    config = ResNetConfig(blocks=(3, 3, 3), width=16)
    config.parameters                     the count, by formula
    model = ResNet(config, seed=0)        the same values for the same seed
    model(images)                         (B, classes)

Initial values: convolutions He normal by what they write (He et al., arXiv:1502.01852), linear maps normal of deviation
1 / sqrt(inputs) (R), norms 1, biases 0; LSTMs as torch has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from deepen.errors import UsageError, nearest


class ShapeConfig(BaseModel):
    """What a model is built from: frozen, no other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def parameters(self) -> int:
        """How many numbers the model learns."""
        raise NotImplementedError

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """A configuration from keys and values.

        Raises:
            UsageError: names the key and, where one is close, the right one.
        """
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            first = error.errors()[0]
            name, path = cls.__name__, ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                raise UsageError(f"{name}: no key {path!r}{nearest(path, cls.model_fields)}") from None
            reason = first["msg"].removeprefix("Value error, ")
            raise UsageError(f"{name}: {path}: {reason}" if path else f"{name}: {reason}") from None


class ImageConfig(ShapeConfig):
    """What every classifier of images states.

    Attributes:
        channels: of the images.
        classes: to tell apart.
    """

    channels: int = Field(default=3, ge=1)
    classes: int = Field(default=10, ge=1)

    @property
    def halvings(self) -> int:
        """How often height and width are halved."""
        raise NotImplementedError

    def head(self, width: int) -> int:
        """Parameters of a linear map from the width to the classes."""
        return (width + 1) * self.classes

    def check(self, images: torch.Tensor) -> None:
        """Refuses what the model cannot read.

        Raises:
            UsageError: not (B, channels, H, W), or too small for the halvings.
        """
        shape, least = tuple(images.shape), 2**self.halvings
        if len(shape) != 4 or shape[1] != self.channels:
            raise UsageError(f"expected images (batch, {self.channels}, height, width), got {shape}")
        if min(shape[2:]) < least:
            raise UsageError(
                f"images of {shape[2]} x {shape[3]} are too small to be halved {self.halvings} times; "
                f"give at least {least} x {least}, or fewer stages"
            )


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draws from this seed, and leaves torch's generator as it was; None draws from the generator."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Gives convolutions, linear maps, embeddings and norms their initial values."""
    for name, module in model.named_modules():
        match module:
            case nn.Conv2d():
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            case nn.Linear():
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
            case nn.BatchNorm2d() | nn.RMSNorm():
                nn.init.ones_(module.weight)
            case nn.Embedding():
                nn.init.normal_(module.weight)
            case nn.LSTM():
                module.reset_parameters()
            case _:
                # assert is for our own bugs: a new part says here how it begins
                assert not list(module.parameters(recurse=False)), f"{name} has no initial values"
        if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
            nn.init.zeros_(bias)
