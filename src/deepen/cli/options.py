"""The options that every command has, and the words they may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from deepen.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Form = Literal["program", "list", "ranges", "rys"]
# What safetensors calls the types that weights are written in.
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command.

    Attributes:
        json: print exactly one JSON document on stdout; progress stays on stderr.
        device: where the weights go.
        dtype: the type that weights are computed in.
        form: the notation of the programs.
    """

    json: Annotated[bool, Parameter(negative="", help="Print one JSON document and nothing else.")] = False
    device: Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1, mps; matters where weights are loaded.")] = "auto"
    dtype: Annotated[Dtype, Parameter(help="Type of the weights; auto keeps that of the files.")] = "auto"
    form: Annotated[Form, Parameter(help="Notation of the programs.")] = "program"

    def torch_dtype(self) -> str | None:
        """The dtype by torch's name, None to keep that of the files."""
        return None if self.dtype == "auto" else self.dtype

    def stored_dtype(self) -> str | None:
        """The dtype by safetensors' name, None to keep that of the files."""
        return STORED.get(self.dtype)

    def torch_device(self) -> str:
        """The device, checked to be there; `auto` is CUDA when there is some, else the CPU.

        Raises:
            UsageError: no such device.
        """
        if self.device == "cpu":
            return "cpu"
        import torch

        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        try:
            torch.empty(0, device=self.device)
        # torch answers an unknown, an absent and an uncompiled device with different types
        except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            message = f"--device {self.device}: not a device of this machine ({reason}); use auto, cpu, cuda or mps"
            raise UsageError(message) from error
        return self.device


DEFAULT = Common()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Keeping(Common):
    """Options of commands whose results a report can show.

    Attributes:
        keep: a folder that gets the result as JSON.
    """

    keep: Annotated[str, Parameter(help="Also keep the result in this folder, for deepen report.")] = ""


KEEPING = Keeping()
