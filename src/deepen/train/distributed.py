"""Several processes that train one model: each takes its share of every batch, and they agree on all else.

    torchrun --nproc-per-node 4 -m deepen train recipe.yaml
    torchrun --nproc-per-node 4 -m deepen heal MODEL ...                           (ddp alone)

    ddp     each process holds the whole model; the gradients are averaged
    fsdp    each process holds a share of every parameter, which is put together while a sublayer runs; a layer is
            wrapped once, however often the program visits it

All start from one seed and draw the same numbers, so that they drop the same visits and run their loops as often; what
is drawn for single rows is the same for the rows of each share. The first process alone writes and prints. All see one
file system.

Sources: Li et al., PyTorch Distributed, arXiv:2006.15704 (ddp); Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from deepen.errors import DeepenError, UsageError
from deepen.stack.stack import Stack

Parallel = Literal["ddp", "fsdp"]
Result = TypeVar("Result")


class ElsewhereError(DeepenError):
    """Another process of the run failed; the message is its own where it could still say it."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a run, as one of them sees them; by itself it is the only one.

    Attributes:
        rank: of this process, from 0.
        count: of all.
        local: the rank on this machine, which is also the number of its GPU.
        how: what each of several holds.
        control: the group in which they agree; None where there is one.
        saving: the group of those who write states in the background.
    """

    rank: int = 0
    count: int = 1
    local: int = 0
    how: Parallel = "ddp"
    control: Any = None
    saving: Any = None

    @property
    def first(self) -> bool:
        """Whether this one writes and prints."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether each process holds a share of the parameters."""
        return self.count > 1 and self.how == "fsdp"

    def place(self, device: str) -> torch.device:
        """The device of this process."""
        found = torch.device(device)
        return torch.device("cuda", self.local) if found.type == "cuda" and self.count > 1 else found

    def share(self, rows: Any, pieces: int) -> Sequence[Any]:
        """The pieces of a batch that this process reads: of each piece that one process would read, its share.

        Raises:
            UsageError: the rows cannot be shared equally.
        """
        if self.count == 1:
            return rows.chunk(pieces)
        if len(rows) % (self.count * pieces):
            raise UsageError(
                f"a batch of {len(rows)} rows cannot be shared equally by {self.count} processes in {pieces} pieces "
                f"each; choose a multiple of {self.count * pieces}"
            )
        return rows.chunk(self.count * pieces)[self.rank :: self.count]

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the processes."""
        if self.count > 1:
            distributed.all_reduce(value)
            value /= self.count
        return value

    def largest(self, value: int) -> int:
        """The largest of what the processes have."""
        if self.count == 1:
            return value
        found = torch.tensor(value)
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self.control)
        return int(found)

    def by_first(self, action: Callable[[], Result], group: Any = None) -> Result:
        """What the first process gets from an action, for all; where it fails, all do.

        Raises:
            ElsewhereError: it failed, in the others.
        """
        if self.count == 1:
            return action()
        if self.first:
            try:
                told = [action(), None]
            except Exception as error:
                distributed.broadcast_object_list([None, str(error)], src=0, group=group or self.control)
                raise
        else:
            told = [None, None]
        distributed.broadcast_object_list(told, src=0, group=group or self.control)
        if told[1] is not None:
            raise ElsewhereError(str(told[1]))
        return told[0]  # pyright: ignore[reportReturnType]

    def spread(self, model: nn.Module) -> nn.Module:
        """What is called in place of a model, so that its gradients are those of the whole batch.

        With `fsdp` the parameters of the model itself become shares.
        """
        if self.count == 1:
            return model
        if self.how == "ddp":
            # what visits that are dropped leave out differs from step to step
            return DistributedDataParallel(model, find_unused_parameters=True)
        # takes a second to import
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if isinstance(model, FSDPModule):
            return model
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            for layer in stack.layers:
                for part in ("a", "f"):
                    # the norms stay with the rest: a wiring may apply the one after a sublayer by itself
                    sublayer = layer.get_submodule(f"{part}.sublayer")
                    if next(sublayer.parameters(), None) is not None:
                        fully_shard(sublayer)
        fully_shard(model)
        return model

    def unsynchronised(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Leaves gradients where they are, for pieces before the last."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


ALONE = Processes()


@contextmanager
def joined(device: str = "cpu", how: Parallel = "ddp") -> Iterator[Processes]:
    """The processes that torchrun started; elsewhere the one that is there.

    Args:
        device: where each of them computes.
        how: what each of them holds.

    Raises:
        UsageError: there are fewer GPUs than processes.
        ElsewhereError: another process ended.
    """
    count, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if count == 1:
        yield ALONE
        return
    on_gpus = torch.device(device).type == "cuda"
    if on_gpus:
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"process {local} of this machine has no GPU of its own: {torch.cuda.device_count()} are there; start "
                "fewer processes"
            )
        torch.cuda.set_device(local)
    distributed.init_process_group("nccl" if on_gpus else "gloo")
    try:
        control = distributed.new_group(backend="gloo")
        saving = distributed.new_group(backend="gloo")
        rank = distributed.get_rank()
        yield Processes(rank=rank, count=count, local=local, how=how, control=control, saving=saving)
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error).lower():
            raise ElsewhereError("another process of the run ended; its own message says why") from error
        raise
    finally:
        distributed.destroy_process_group()


def single(model: Any) -> Any:
    """The model itself, of what is called in its place."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor put together from the shares of all processes, who all have to ask; others as they are."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def gathered(stack: Stack) -> Stack:
    """A stack of whole parameters with the values of one of shares."""
    made = Stack(stack.config, seed=0)
    made.load_state_dict({name: whole(tensor.detach()) for name, tensor in stack.state_dict().items()})
    return made.to(next(stack.parameters()).device).train(stack.training)
