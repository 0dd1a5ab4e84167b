"""Exact merges of convolutions: what stands between two of them, and is no activation, goes into one kernel.

    y = W2 * (W1 * x + b1) + b2   =   (W2 o W1) * x + b        b = b2 + sum over places and channels of W2 b1

    kernel   k = (k1 - 1) d1 + 1 + (k2 - 1) d2 s1      stride s1 s2      padding p1 + s1 p2

The padding of the second is moved to the first. In the interior this changes nothing; at the border the second used to
read zeros and now reads what the first makes of zeros. Where the second has no padding, it is exact everywhere.

A batch norm in eval mode is a scale and a shift of each channel; the addition of the input is a kernel of a single 1.

Kim et al., LayerMerge, ICML 2024, arXiv:2406.12837.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepen.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn


def merge_convs(first: nn.Conv2d, second: nn.Conv2d) -> nn.Conv2d:
    """One convolution in the place of two that stand behind each other.

    Args:
        first: reads the input; groups are written out.
        second: reads what the first gives.

    Raises:
        UsageError: channels that do not fit, or padding that is not zeros of a stated size.
    """
    import torch
    from torch.nn.functional import conv2d

    one, two = _checked(first), _checked(second)
    if first.out_channels != second.in_channels:
        raise UsageError(
            f"merge_convs: the first gives {first.out_channels} channels and the second reads {second.in_channels}"
        )
    stride = _pair(first.stride)
    inner = _spread(_dense(first), _pair(first.dilation))
    step = tuple(s * d for s, d in zip(stride, _pair(second.dilation), strict=True))
    outer = _spread(_dense(second), (step[0], step[1]))
    edge = (outer.shape[2] - 1, outer.shape[3] - 1)
    # A full convolution of kernels: conv2d correlates, so one of them is turned round, and its channels are summed.
    kernel = conv2d(inner.transpose(0, 1), outer.flip(2, 3), padding=edge).transpose(0, 1)
    made = _empty(
        first,
        kernel,
        stride=tuple(a * b for a, b in zip(stride, _pair(second.stride), strict=True)),
        padding=tuple(p + s * q for p, s, q in zip(one, stride, two, strict=True)),
        bias=first.bias is not None or second.bias is not None,
    )
    if made.bias is not None:
        with torch.no_grad():
            made.bias.zero_()
            if second.bias is not None:
                made.bias += second.bias
            if first.bias is not None:
                made.bias += outer.sum((2, 3)) @ first.bias
    return made


def fold_norm(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """A convolution that does what it and the batch norm behind it do in eval mode.

    Raises:
        UsageError: channels that do not fit, or a norm that keeps no statistics.
    """
    import torch

    padding = _checked(convolution)
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        raise UsageError("fold_norm: the batch norm keeps no running statistics, so it is no fixed scale and shift")
    if norm.num_features != convolution.out_channels:
        raise UsageError(
            f"fold_norm: the convolution gives {convolution.out_channels} channels, the norm has {norm.num_features}"
        )
    with torch.no_grad():
        scale = torch.rsqrt(variance + norm.eps) * (norm.weight if norm.affine else 1.0)
        kernel = _spread(_dense(convolution), _pair(convolution.dilation)) * scale[:, None, None, None]
        made = _empty(convolution, kernel, stride=_pair(convolution.stride), padding=padding, bias=True)
        assert made.bias is not None
        own = convolution.bias if convolution.bias is not None else torch.zeros_like(mean)
        made.bias.copy_((own - mean) * scale + (norm.bias if norm.affine else 0.0))
    return made


def fold_skip(convolution: nn.Conv2d) -> nn.Conv2d:
    """A convolution that gives what it gave plus its input.

    Raises:
        UsageError: its output is not of the shape of its input, or its kernel has no middle.
    """
    import torch

    padding = _checked(convolution)
    kernel = _spread(_dense(convolution), _pair(convolution.dilation)).clone()
    sides = (kernel.shape[2], kernel.shape[3])
    middle = (sides[0] // 2, sides[1] // 2)
    if kernel.shape[0] != kernel.shape[1] or _pair(convolution.stride) != (1, 1) or padding != middle:
        raise UsageError("fold_skip: the input can only be added to an output of its own shape")
    if sides[0] % 2 == 0 or sides[1] % 2 == 0:
        raise UsageError(f"fold_skip: a kernel of {sides[0]} x {sides[1]} has no middle")
    with torch.no_grad():
        kernel[:, :, middle[0], middle[1]] += torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        made = _empty(convolution, kernel, stride=(1, 1), padding=padding, bias=convolution.bias is not None)
        if made.bias is not None and convolution.bias is not None:
            made.bias.copy_(convolution.bias)
    return made


def _checked(convolution: nn.Conv2d) -> tuple[int, int]:
    """The padding of a convolution that pads with zeros."""
    padding: Any = convolution.padding
    if convolution.padding_mode != "zeros" or isinstance(padding, str):
        raise UsageError(
            f"a convolution with padding {padding!r} of {convolution.padding_mode} cannot be merged; expected zeros of "
            "a stated size"
        )
    return _pair(padding)


def _pair(sizes: Any) -> tuple[int, int]:
    return sizes[0], sizes[1]


def _dense(convolution: nn.Conv2d) -> torch.Tensor:
    """The kernel without groups, [out, in, h, w]."""
    weight, groups = convolution.weight.detach(), convolution.groups
    if groups == 1:
        return weight
    out, inside = len(weight) // groups, weight.shape[1]
    made = weight.new_zeros(len(weight), inside * groups, *weight.shape[2:])
    for at in range(groups):
        made[at * out : (at + 1) * out, at * inside : (at + 1) * inside] = weight[at * out : (at + 1) * out]
    return made


def _spread(kernel: torch.Tensor, steps: tuple[int, int]) -> torch.Tensor:
    """A kernel whose entries stand so many places apart."""
    sides = [(size - 1) * step + 1 for size, step in zip(kernel.shape[2:], steps, strict=True)]
    made = kernel.new_zeros(*kernel.shape[:2], *sides)
    made[:, :, :: steps[0], :: steps[1]] = kernel
    return made


def _empty(like: nn.Conv2d, kernel: torch.Tensor, *, stride: Any, padding: Any, bias: bool) -> nn.Conv2d:
    """A convolution of this kernel; its bias is left unset."""
    import torch
    from torch import nn

    out, into, *sides = kernel.shape
    made = nn.Conv2d(
        into, out, (sides[0], sides[1]), stride=stride, padding=padding, bias=bias,
        device=like.weight.device, dtype=like.weight.dtype,
    )  # fmt: skip
    with torch.no_grad():
        made.weight.copy_(kernel)
    return made.train(like.training)
