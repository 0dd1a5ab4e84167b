"""A folder that holds a native stack, opened as a checkpoint: `deepen show`, `run` and `eval` take it.

Another program runs the same layers. Parameters of the wiring and of the program belong to visits, so a program that
would need others of them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import PreTrainedTokenizerFast

from deepen.checkpoint.checkpoint import Checkpoint
from deepen.checkpoint.family import Family, Tower
from deepen.checkpoint.sources import Source
from deepen.checkpoint.stack_model import MODEL_TYPE, to_transformers
from deepen.errors import CheckpointError, FamilyError, UsageError
from deepen.program import Program
from deepen.stack.config import StackConfig
from deepen.stack.cost import stack_cost
from deepen.stack.stack import Stack

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from deepen.program.cost import Cost

FAMILY = Family(model_type=MODEL_TYPE, towers=(Tower(name="text", container="layers", caches=True),), tiny={})
# The names of the tensors in the model of transformers.
PREFIX = "stack."


@dataclass(frozen=True, eq=False)
class StackCheckpoint(Checkpoint):
    """A stack on disk and a program for its layers."""

    @cached_property
    def stack_config(self) -> StackConfig:
        """The configuration with the program of the checkpoint."""
        stored = _stored(self.config, self.where)
        return stored.model_copy(update={"program": str(self.program)})

    @property
    def identity(self) -> Program:
        return Program.parse(_stored(self.config, self.where).program or f"0-{self.depth['text'] - 1}")

    @cached_property
    def sets(self) -> dict[str, dict[str, Any]]:
        return {"text": {}}

    @cached_property
    def skeleton(self) -> NoReturn:
        raise self._refused

    @cached_property
    def disk(self) -> NoReturn:
        raise self._refused

    def require_layers(self) -> NoReturn:
        raise self._refused

    def layout(self, *, bake: bool = False) -> NoReturn:
        raise self._refused

    @property
    def _refused(self) -> FamilyError:
        return FamilyError(
            f"{self.where} is a native stack; deepen show, run and eval take it, deepen train makes another"
        )

    def require_executable(self) -> None:
        with torch.device("meta"):
            self._origins(Stack(self.stack_config, seed=None))

    def _origins(self, stack: Stack) -> dict[str, str]:
        """Which stored tensor each parameter and buffer of a stack takes.

        Raises:
            FamilyError: one is not among them, or one outside of the layers is left over.
        """
        found, infos = dict[str, str](), self.source.infos
        for name, tensor in stack.state_dict().items():
            origin = name
            if name.startswith("layers."):
                _, child, rest = name.split(".", 2)
                origin = f"layers.{stack.written.keys[int(child)].layer}.{rest}"
            if origin == "head.weight" and stack.config.tied:
                origin = "embedding.weight"
            if PREFIX + origin not in infos or tuple(infos[PREFIX + origin].shape) != tuple(tensor.shape):
                raise self._unfit(name)
            found[name] = PREFIX + origin
        left = [name for name in infos if name not in found.values() and not name.startswith(f"{PREFIX}layers.")]
        if left:
            raise self._unfit(left[0].removeprefix(PREFIX))
        return found

    def _unfit(self, name: str) -> FamilyError:
        return FamilyError(
            f"{self.where}: {name} does not fit the program {self.program}: parameters of visits belong to the program "
            "that they were trained with"
        )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        file = None if self.folder is None else self.folder / "tokenizer.json"
        if file is None or not file.is_file():
            raise CheckpointError(f"{self.where}: no tokenizer.json beside the weights; its tokens are no text")
        return PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False)

    def cost(self, context: int = 1024) -> Cost:
        with torch.device("meta"):
            return stack_cost(Stack(self.stack_config, seed=None), context)

    def load(
        self, *, dtype: Any = None, device: str = "cpu", attn_implementation: str | None = None
    ) -> PreTrainedModel:
        """The stack as a model of transformers; see `Checkpoint.load`.

        Raises:
            UsageError: another attention than the stack's own.
        """
        if attn_implementation not in (None, "sdpa"):
            raise UsageError(
                f"a stack computes attention itself; attn_implementation {attn_implementation!r} is not its"
            )
        stack = Stack(self.stack_config, seed=0)
        stack.load_state_dict({name: self.source.read(origin) for name, origin in self._origins(stack).items()})
        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return to_transformers(stack.to(device=device, dtype=kind)).eval()


def open_stack(where: str, folder: Path | None, raw: Mapping[str, Any], source: Source) -> StackCheckpoint:
    """Opens the folder of a stack; reads no weights.

    Raises:
        CheckpointError: a configuration that builds no stack.
    """
    config = _stored(raw, where)
    bank = {"text": tuple(range(config.layers))}
    program = Program.parse(config.program or f"0-{config.layers - 1}")
    return StackCheckpoint(where, folder, FAMILY, dict(raw), source, bank, program)


def _stored(raw: Mapping[str, Any], where: str) -> StackConfig:
    try:
        return StackConfig.read(dict(raw["stack"]))
    except (UsageError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: config.json of a stack needs its configuration: {error}") from error
