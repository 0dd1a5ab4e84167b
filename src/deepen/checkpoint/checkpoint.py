"""A checkpoint: a bank of layers on disk and the program that runs them. Immutable; every operation gives a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepen.checkpoint.disk import DiskTower, check_tensors, read_towers
from deepen.checkpoint.experts import Split
from deepen.checkpoint.family import Family
from deepen.checkpoint.layout import Layout, layout
from deepen.checkpoint.original import original_program
from deepen.checkpoint.owned import OwnedSet, owned_recipes, owned_sets
from deepen.checkpoint.recipes import Recipe
from deepen.checkpoint.refuse import refuse_attributes, refuse_sharing
from deepen.checkpoint.skeleton import Skeleton
from deepen.checkpoint.sources import Source
from deepen.checkpoint.taps import refuse_taps
from deepen.checkpoint.widths import bank_modules
from deepen.errors import ProgramError
from deepen.program import Plan, Program

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from deepen.checkpoint.changes import Changes
    from deepen.program.cost import Cost


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A bank of layers on disk and a program.

    Attributes:
        where: what errors call it: the path or hub id it was opened from.
        folder: the folder whose other files (tokenizer, licence ...) come along; None when there is none.
        family: what deepen knows about its model type.
        config: the config of the original model, as read.
        source: the tensors, by name; headers only.
        banks: for each tower, the layer of the original model that each stored layer is.
        program: which layer is visited when, one entry a tower.
        gguf: the GGUF file it was opened from, if any.
        adapter: the folder of a LoRA adapter that belongs to the model, if any.
        made: for each tower, how many layers at the end of its bank are computed ones (merged, fused ...).
        widths: for each tower, the feed-forward width of the stored layers that do not have that of the config.
        factors: for each tower, the stored layers with linear maps of two factors, and their ranks by path.
        experts: for each tower, the stored layers whose feed-forward is split into experts, and how.
        owned: the program whose own parameters (adapters, gates ...) are among the tensors; None when there are none.
    """

    where: str
    folder: Path | None
    family: Family
    config: Mapping[str, Any]
    source: Source
    banks: Mapping[str, tuple[int, ...]]
    program: Program
    gguf: Path | None = None
    adapter: Path | None = None
    made: Mapping[str, int] = field(default_factory=dict)
    widths: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    factors: Mapping[str, Mapping[int, Mapping[str, int]]] = field(default_factory=dict)
    experts: Mapping[str, Mapping[int, Split]] = field(default_factory=dict)
    owned: Program | None = None

    @property
    def depth(self) -> dict[str, int]:
        """Stored layers of each tower."""
        return {name: len(bank) for name, bank in self.banks.items()}

    @property
    def identity(self) -> Program:
        """The program of the original model: every layer of the files once, or as often as the class visits it."""
        banks = {name: bank[: len(bank) - self.made.get(name, 0)] for name, bank in self.banks.items()}
        return original_program(self.config, self.family, banks)

    @cached_property
    def skeleton(self) -> Skeleton:
        """The original model class without weights, to check against."""
        return Skeleton(self.family, self.config, self.where)

    @cached_property
    def disk(self) -> dict[str, DiskTower]:
        """Which tensor belongs to which stored layer; shapes are checked against the config."""
        towers = read_towers(self.source, self.skeleton, self.depth, self.where)
        modules = {tower.name: bank_modules(self, tower) for tower in self.family.towers}
        check_tensors(self.source.infos, self.skeleton, towers, modules, self.where)
        return towers

    @cached_property
    def sets(self) -> dict[str, dict[str, OwnedSet]]:
        """For each tower, the parameters that its program owns beside the bank, by name.

        Raises:
            FamilyError: a layer or a stream of this family cannot have them.
            ProgramError: a rank above that of every matrix.
        """
        return {tower.name: owned_sets(self, tower) for tower in self.family.towers}

    @cached_property
    def owned_tensors(self) -> dict[str, Recipe]:
        """A recipe for each of their tensors by full name: from the files, else what it starts with.

        Raises:
            CheckpointError: the files lack a tensor of the program they were saved with.
        """
        return {name: recipe for tower in self.family.towers for name, recipe in owned_recipes(self, tower).items()}

    def apply(self, program: Program | str) -> Checkpoint:
        """The same bank under another program; towers that the program does not name keep theirs.

        Raises:
            ProgramError: the program is malformed or does not fit the bank.
            FamilyError: a tower that the model does not have.
        """
        given = Program.parse(program) if isinstance(program, str) else program
        merged = self.program
        for name in given.towers:
            tower = self.family.tower(name).name
            # Planned from the text as the user wrote it, so that errors point into it.
            self._plan(given, name, tower)
            merged = merged.with_tower(self._key(tower), given.towers[name])
        return replace(self, program=merged)

    def plan(self, tower: str = "") -> Plan:
        """The program of one tower, expanded; the empty name means the default tower.

        Raises:
            FamilyError: no such tower, or the empty name is ambiguous.
        """
        name = self.family.tower(tower).name
        return self._plan(self.program, self._key(name), name)

    def _key(self, tower: str) -> str:
        """The name that `program` uses for a tower: none when the model has only one."""
        return tower if len(self.family.towers) > 1 else ""

    def _plan(self, program: Program, key: str, tower: str) -> Plan:
        depth = self.depth[tower]
        plan = program.plan(depth, [self.family.tower(tower).parts.letters] * depth, key)
        if not plan.visits:
            raise ProgramError("the program visits no layer; expected at least one", program.text)
        return plan

    def require_executable(self) -> None:
        """Refuses, by name, what the program asks for and this back end does not execute.

        Raises:
            ProgramError: an attribute that is parsed but not executed on checkpoints.
            FamilyError: something that a model of this family cannot do.
        """
        for tower in self.family.towers:
            plan = self.plan(tower.name)
            refuse_attributes(plan, tower, self.family.model_type)
            refuse_sharing(plan, self.skeleton.layers(tower), self.banks[tower.name], self.where)
            refuse_taps(self, tower)
        self.sets  # noqa: B018  (what cannot be owned is refused where it is built)

    def require_layers(self) -> None:
        """Refuses what works on the layers of a model of transformers, where the checkpoint holds another.

        Raises:
            FamilyError: it holds a native stack.
        """

    def cost(self, context: int = 1024) -> Cost:
        """Parameters, visits, FLOPs a token and cache bytes at `context` tokens, summed over the towers."""
        from deepen.checkpoint.layer_cost import checkpoint_cost

        return checkpoint_cost(self, context)

    def load(
        self, *, dtype: Any = None, device: str = "cpu", attn_implementation: str | None = None
    ) -> PreTrainedModel:
        """A transformers model that runs the program; `model.deepen` holds its plans, marks and loop counts.

        Args:
            dtype: torch dtype or its name; None keeps that of the files.
            device: where the weights go.
            attn_implementation: `eager`, `sdpa` ...; None lets transformers choose.

        Raises:
            ProgramError: the program asks for something that is not executed on checkpoints.
            FamilyError: the family cannot do what the program asks for.
            CheckpointError: the files do not hold what the model needs.
        """
        from deepen.checkpoint.load import load

        return load(self, dtype=dtype, device=device, attn_implementation=attn_implementation)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that lies beside the weights.

        Raises:
            CheckpointError: there is none.
        """
        from deepen.checkpoint.load import load_tokenizer

        return load_tokenizer(self)

    def layout(self, *, bake: bool = False) -> Layout:
        """The form, config and tensors that a save would write; made once."""
        if bake not in self._layouts:
            self._layouts[bake] = layout(self, bake=bake)
        return self._layouts[bake]

    @cached_property
    def _layouts(self) -> dict[bool, Layout]:
        return {}

    def changes(self, *, bake: bool = False) -> Changes:
        """The dry run of a save: every tensor and config field that would differ. Writes nothing."""
        from deepen.checkpoint.changes import changes

        return changes(self, self.layout(bake=bake))

    def save(
        self,
        folder: str | Path,
        *,
        bake: bool = False,
        dtype: str | None = None,
        verify: bool = False,
        max_shard_bytes: int = 5 * 10**9,
        progress: Any = None,
    ) -> Changes:
        """Writes the checkpoint to a new folder, streaming and atomically.

        Args:
            folder: must not exist.
            bake: write shared layers out, for programs that do not know deepen.
            dtype: convert floating tensors to this safetensors dtype (`BF16`, `F16`, `F32`); None keeps them.
            verify: also load the result and compare its logits with the model in memory.
            max_shard_bytes: size of one weight file.
            progress: called with the number of bytes written since the last call.

        Raises:
            SaveError: the folder exists, cannot be written, the disk is full, or the result does not verify.
        """
        from deepen.checkpoint.save import save

        return save(
            self,
            Path(folder),
            bake=bake,
            dtype=dtype,
            verify=verify,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
