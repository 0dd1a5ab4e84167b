"""A network's depth is a program.

    import deepen
    ck = deepen.open("Qwen/Qwen3-0.6B")          # reads headers only
    model = ck.apply("0-17 23-27").load()        # a transformers model that runs the program
    ck.apply("0-3 (4-7)*2 8-27").save("out")     # a checkpoint on disk

Importing this module imports neither torch nor transformers; `import deepen.hf` registers the auto classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deepen.adaptive.search.search import Found as Found
    from deepen.adaptive.search.search import search as search
    from deepen.checkpoint.checkpoint import Checkpoint as Checkpoint
    from deepen.checkpoint.open import open_checkpoint as open
    from deepen.checkpoint.stack_model import to_transformers as to_transformers
    from deepen.checkpoint.stack_weights import save_stack as save_stack
    from deepen.checkpoint.stack_weights import to_stack as to_stack
    from deepen.probe.activations import activations as activations
    from deepen.probe.calibration import calibrate as calibrate
    from deepen.probe.distance import Distance as Distance
    from deepen.probe.distance import distance as distance
    from deepen.probe.feed_inputs import feed_inputs as feed_inputs
    from deepen.probe.interval import Difference as Difference
    from deepen.probe.interval import paired_difference as paired_difference
    from deepen.probe.perplexity import Evaluation as Evaluation
    from deepen.probe.perplexity import perplexity as perplexity
    from deepen.probe.scores.base import Scores as Scores
    from deepen.probe.scores.score import score as score
    from deepen.probe.speed import Speed as Speed
    from deepen.probe.speed import speed as speed
    from deepen.probe.tasks import TaskScore as TaskScore
    from deepen.probe.tasks import evaluate_tasks as evaluate_tasks
    from deepen.probe.trie import evaluate_many as evaluate_many
    from deepen.program import Plan as Plan
    from deepen.program import Program as Program
    from deepen.stack.config import StackConfig as StackConfig
    from deepen.stack.generate import generate as generate
    from deepen.stack.reprogram import reprogram as reprogram
    from deepen.stack.stack import Stack as Stack
    from deepen.surgery.activations import Activations as Activations
    from deepen.surgery.drop import drop as drop
    from deepen.surgery.drop import drop_block as drop_block
    from deepen.surgery.expand import expand as expand
    from deepen.surgery.expert_layers import activate as activate
    from deepen.surgery.factor_llm import factor_llm as factor_llm
    from deepen.surgery.feed_inputs import FeedInputs as FeedInputs
    from deepen.surgery.fuse import fuse as fuse
    from deepen.surgery.layermerge import layer_merge as layer_merge
    from deepen.surgery.learngene import expand_linear as expand_linear
    from deepen.surgery.learngene import expand_stages as expand_stages
    from deepen.surgery.loop import loop as loop
    from deepen.surgery.lowrank import low_rank as low_rank
    from deepen.surgery.merge import merge as merge
    from deepen.surgery.moefy import moefy as moefy
    from deepen.surgery.narrow import narrow as narrow
    from deepen.surgery.parallel import parallel as parallel
    from deepen.surgery.relax import relax as relax
    from deepen.surgery.replace import Calibration as Calibration
    from deepen.surgery.replace import replace_block as replace_block
    from deepen.surgery.report import Report as Report
    from deepen.surgery.retrofit import retrofit as retrofit
    from deepen.surgery.stack import g_stack as g_stack
    from deepen.surgery.stack import growth_tokens as growth_tokens
    from deepen.surgery.stack import stack_last as stack_last
    from deepen.surgery.stack import stack_list as stack_list
    from deepen.surgery.stack import stack_middle as stack_middle
    from deepen.surgery.stack_experts import SplitStack as SplitStack
    from deepen.surgery.stack_experts import active_experts as active_experts
    from deepen.surgery.stack_experts import split_experts as split_experts
    from deepen.surgery.tie import tie as tie
    from deepen.surgery.upscale import upscale as upscale
    from deepen.surgery.widen import widen as widen
    from deepen.train.heal import Healed as Healed
    from deepen.train.heal import heal as heal
    from deepen.train.recipe import Recipe as Recipe
    from deepen.train.replace_attention import replace_attention as replace_attention

# Public name -> where it lives; resolved on first use.
_LAZY = {
    "Activations": "deepen.surgery.activations:Activations",
    "Calibration": "deepen.surgery.replace:Calibration",
    "Checkpoint": "deepen.checkpoint.checkpoint:Checkpoint",
    "Difference": "deepen.probe.interval:Difference",
    "Distance": "deepen.probe.distance:Distance",
    "Evaluation": "deepen.probe.perplexity:Evaluation",
    "FeedInputs": "deepen.surgery.feed_inputs:FeedInputs",
    "Found": "deepen.adaptive.search.search:Found",
    "Healed": "deepen.train.heal:Healed",
    "Plan": "deepen.program:Plan",
    "Program": "deepen.program:Program",
    "Recipe": "deepen.train.recipe:Recipe",
    "Report": "deepen.surgery.report:Report",
    "Scores": "deepen.probe.scores.base:Scores",
    "Speed": "deepen.probe.speed:Speed",
    "SplitStack": "deepen.surgery.stack_experts:SplitStack",
    "Stack": "deepen.stack.stack:Stack",
    "StackConfig": "deepen.stack.config:StackConfig",
    "TaskScore": "deepen.probe.tasks:TaskScore",
    "activate": "deepen.surgery.expert_layers:activate",
    "active_experts": "deepen.surgery.stack_experts:active_experts",
    "activations": "deepen.probe.activations:activations",
    "calibrate": "deepen.probe.calibration:calibrate",
    "distance": "deepen.probe.distance:distance",
    "drop": "deepen.surgery.drop:drop",
    "drop_block": "deepen.surgery.drop:drop_block",
    "evaluate_many": "deepen.probe.trie:evaluate_many",
    "evaluate_tasks": "deepen.probe.tasks:evaluate_tasks",
    "expand": "deepen.surgery.expand:expand",
    "expand_linear": "deepen.surgery.learngene:expand_linear",
    "expand_stages": "deepen.surgery.learngene:expand_stages",
    "factor_llm": "deepen.surgery.factor_llm:factor_llm",
    "feed_inputs": "deepen.probe.feed_inputs:feed_inputs",
    "fuse": "deepen.surgery.fuse:fuse",
    "g_stack": "deepen.surgery.stack:g_stack",
    "generate": "deepen.stack.generate:generate",
    "growth_tokens": "deepen.surgery.stack:growth_tokens",
    "heal": "deepen.train.heal:heal",
    "layer_merge": "deepen.surgery.layermerge:layer_merge",
    "loop": "deepen.surgery.loop:loop",
    "low_rank": "deepen.surgery.lowrank:low_rank",
    "merge": "deepen.surgery.merge:merge",
    "moefy": "deepen.surgery.moefy:moefy",
    "narrow": "deepen.surgery.narrow:narrow",
    "open": "deepen.checkpoint.open:open_checkpoint",
    "paired_difference": "deepen.probe.interval:paired_difference",
    "parallel": "deepen.surgery.parallel:parallel",
    "perplexity": "deepen.probe.perplexity:perplexity",
    "relax": "deepen.surgery.relax:relax",
    "replace_attention": "deepen.train.replace_attention:replace_attention",
    "replace_block": "deepen.surgery.replace:replace_block",
    "reprogram": "deepen.stack.reprogram:reprogram",
    "retrofit": "deepen.surgery.retrofit:retrofit",
    "save_stack": "deepen.checkpoint.stack_weights:save_stack",
    "score": "deepen.probe.scores.score:score",
    "search": "deepen.adaptive.search.search:search",
    "speed": "deepen.probe.speed:speed",
    "split_experts": "deepen.surgery.stack_experts:split_experts",
    "stack_last": "deepen.surgery.stack:stack_last",
    "stack_list": "deepen.surgery.stack:stack_list",
    "stack_middle": "deepen.surgery.stack:stack_middle",
    "tie": "deepen.surgery.tie:tie",
    "to_stack": "deepen.checkpoint.stack_weights:to_stack",
    "to_transformers": "deepen.checkpoint.stack_model:to_transformers",
    "upscale": "deepen.surgery.upscale:upscale",
    "widen": "deepen.surgery.widen:widen",
}

__all__ = [
    "Activations",
    "Calibration",
    "Checkpoint",
    "Difference",
    "Distance",
    "Evaluation",
    "FeedInputs",
    "Found",
    "Healed",
    "Plan",
    "Program",
    "Recipe",
    "Report",
    "Scores",
    "Speed",
    "SplitStack",
    "Stack",
    "StackConfig",
    "TaskScore",
    "__version__",
    "activate",
    "activations",
    "active_experts",
    "calibrate",
    "distance",
    "drop",
    "drop_block",
    "evaluate_many",
    "evaluate_tasks",
    "expand",
    "expand_linear",
    "expand_stages",
    "factor_llm",
    "feed_inputs",
    "fuse",
    "g_stack",
    "generate",
    "growth_tokens",
    "heal",
    "layer_merge",
    "loop",
    "low_rank",
    "merge",
    "moefy",
    "narrow",
    "open",
    "paired_difference",
    "parallel",
    "perplexity",
    "relax",
    "replace_attention",
    "replace_block",
    "reprogram",
    "retrofit",
    "save_stack",
    "score",
    "search",
    "speed",
    "split_experts",
    "stack_last",
    "stack_list",
    "stack_middle",
    "tie",
    "to_stack",
    "to_transformers",
    "upscale",
    "widen",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'deepen' has no attribute {name!r}")
    module, attribute = _LAZY[name].split(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
