"""Recursive tying with adapters for each turn, which start as the best approximation of what tying took away.

    0 1 2 3 4 5      relax(times=2, rank=8)      (6 7 8)*2[lora=8]

For layer l of the stretch and each of its linear maps, with W_l [out, in] and W' that of the layer it is tied to:

    W_l - W' = U S Vt          B A alpha / r = U_r S_r Vt_r          B = U_r S_r / 2,  A = Vt_r,  alpha = 2 r

So the error of a matrix is the tail of its singular values, |W_l - W' - 2 B A|^2 = sum_{i > r} S_i^2, and falls with r.
Norms and biases are those of the tied layer: a program has no copies of them for each turn. Where they are equal in
the tied layers and r is the full rank, the result is the original model. No matrix has a higher rank than its smaller
side, so a larger r counts as that for the smaller matrices.

Computed from the eigenvectors of the smaller of D D^T and D^T D, D = W_l - W', in fp64 for F64 and in fp32 for all
other types. Singular values of less than about 3e-4 of the largest are not told apart in fp32; of the error that is
left they change less than 1e-5. Each matrix is read and decomposed when it is written, so a conversion from disk holds
a few matrices at a time.

Cost: n / B layers and r (in + out) values for each linear map and turn; 2 r (in + out) FLOPs a token more.

Bae et al., Relaxed Recursive Transformers: Effective Parameter Sharing with Layer-wise LoRA, arXiv:2410.20672.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deepen.checkpoint.computed import ComputedSource, layer_tensors
from deepen.checkpoint.recipes import NUMBERS, Copy, Described, Recipe, rounded
from deepen.errors import CheckpointError, FamilyError, UsageError
from deepen.registry import method
from deepen.surgery.place import tower_key
from deepen.surgery.report import Report, report
from deepen.surgery.tie import How, tied

if TYPE_CHECKING:
    import torch

    from deepen.checkpoint.checkpoint import Checkpoint
    from deepen.checkpoint.family import Tower
    from deepen.checkpoint.sources import Source, TensorInfo
    from deepen.program import Visit

# Singular values below this share of the largest are rounding.
LEAST = 1e-8


@method(
    "relax",
    family="surgery",
    source="arXiv:2410.20672",
    title="Relaxed Recursive Transformers: Effective Parameter Sharing with Layer-wise LoRA",
    mechanism="tied layers with LoRA for each turn, from the truncated SVD of what tying took away",
    cost="1 / B of the parameters of the stretch and r (in + out) a map and turn; 2 r (in + out) FLOPs a token more",
)
def relax(
    ck: Checkpoint,
    times: int,
    *,
    rank: int,
    how: How = "average",
    first: int | None = None,
    last: int | None = None,
    tower: str = "",
) -> tuple[Checkpoint, Report]:
    """Ties a stretch of layers into a loop, with adapters of rank `rank` for each turn.

        relaxed, report = deepen.relax(ck, 3, rank=32)

    Args:
        ck: what to change.
        times: turns of the loop.
        rank: of the adapters.
        how: where the tied layers come from, as for `tie`.
        first: the first layer of the stretch; None starts with the program.
        last: the last layer of the stretch; None ends with the program.
        tower: the tower; the empty name means the default one.

    Raises:
        UsageError: as `tie`; a rank below 1; a program that owns parameters already.
        ProgramError: as `tie`; a rank above that of every matrix.
        FamilyError: as `tie`; layers whose matrices cannot have adapters.
        CheckpointError: matrices whose values are codes.
    """
    found, _ = tower_key(ck, tower)
    if rank < 1:
        raise UsageError(f"relax: a rank is at least 1, got {rank}")
    if any(ck.plan(each.name).owned for each in ck.family.towers):
        raise UsageError(f"relax: the program {ck.program} owns parameters already; bake it first")
    made, note, groups = tied(ck, times, how, first, last, tower, f"[lora={rank}]")
    stands_for = dict(groups)
    recipes: dict[str, Recipe] = {}
    for visit in made.plan(found.name).visits:
        if visit.lora is not None:
            recipes |= _adapters(made, found, visit, stands_for[visit.key.layer][visit.lora.turn])
    made = replace(made, source=ComputedSource(made.source, recipes), owned=made.program)
    merged = dict(groups) if how == "average" else {}
    told = f"{note}, with adapters of rank {rank} for each turn; norms and biases are shared by the turns"
    return made, report(ck, made, found.name, "relax", told, merged=merged)


def _adapters(ck: Checkpoint, tower: Tower, visit: Visit, original: int) -> dict[str, Recipe]:
    """The adapters of a visit, by full name, that bring its layer back to the layer `original`."""
    from deepen.checkpoint.owned import map_tensors

    assert visit.lora is not None
    infos, recipes = ck.source.infos, dict[str, Recipe]()
    own, other = (layer_tensors(ck, tower, layer) for layer in (visit.key.layer, original))
    for path, place in map_tensors(ck, tower, visit).items():
        name = f"{path}.weight"
        if name not in own:
            raise FamilyError(f"{ck.where}: the files hold no {name} of layer {original} under that name")
        matrices = [Copy(full, infos[full]) for full in (other[name], own[name])]
        difference = Difference(matrices[0], matrices[1], place.turned)
        for letter, (full, shape) in place.tensors.items():
            recipes[full] = Factor(difference, letter, replace(infos[own[name]], shape=shape))
    return recipes


@dataclass(frozen=True, eq=False, slots=True)
class Difference:
    """What a tied matrix lacks to be the original, decomposed once for both of its factors.

    Attributes:
        original: W_l.
        tied: W'.
        turned: they are stored [in, out].
        held: the factor that was computed along with the other and not yet asked for, by its letter and rank.
    """

    original: Recipe
    tied: Recipe
    turned: bool
    held: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for recipe in (self.original, self.tied):
            if recipe.dtype not in NUMBERS:
                raise CheckpointError(
                    f"relax: a matrix of type {recipe.dtype} holds codes, not numbers; dequantise the model first"
                )

    def factor(self, source: Source, letter: str, rank: int) -> torch.Tensor:
        """A [rank, in] or B [out, rank] in fp32, or in fp64 for F64."""
        if (letter, rank) not in self.held:
            import torch

            wide = torch.float64 if self.original.dtype == "F64" else torch.float32
            original, tied = (recipe.compute(source).to(wide) for recipe in (self.original, self.tied))
            a, b = factors((original - tied).T if self.turned else original - tied, rank)
            self.held.update({("A", rank): a, ("B", rank): b})
        return self.held.pop((letter, rank))


@dataclass(frozen=True, eq=False, slots=True)
class Factor(Described):
    """One factor of a difference as a tensor of the files."""

    difference: Difference
    letter: str
    info: TensorInfo

    def compute(self, source: Source) -> torch.Tensor:
        """The factor, rounded once."""
        rank = self.shape[0 if self.letter == "A" else 1]
        return rounded(self.difference.factor(source, self.letter, rank), self.dtype, "an adapter")


def factors(difference: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [out, rank] whose product, times alpha / r = 2, is the nearest matrix of this rank.

    Args:
        difference: [out, in] in fp32 or fp64.
        rank: at most the smaller side.
    """
    import torch

    wide = difference.shape[0] <= difference.shape[1]
    gram = difference @ difference.T if wide else difference.T @ difference
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :rank]
    # The other side's vectors, each as long as its singular value.
    long = difference.T @ vectors if wide else difference @ vectors
    values = long.norm(dim=0)
    # Of a difference of 0 every value is 0, and so is what is divided.
    unit = long / values.clamp(min=(LEAST * values.max()).clamp(min=torch.finfo(values.dtype).tiny))
    return (unit.T, vectors * values / 2) if wide else (vectors.T, long / 2)
