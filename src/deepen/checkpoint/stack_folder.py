"""A trained stack as a folder that `deepen run`, `deepen eval` and transformers open.

FOLDER/config.json          model_type: deepen, with the configuration of the stack
/model.safetensors
/tokenizer.json       where its tokens are text
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from deepen.checkpoint.load import quiet
from deepen.checkpoint.stack_model import to_transformers
from deepen.stack.stack import Stack


def write_stack(stack: Stack, folder: Path, tokenizer: str | None = None) -> None:
    """Writes a stack into a folder that exists.

    Args:
        stack: to be written.
        folder: where to.
        tokenizer: the JSON of a `tokenizers.Tokenizer`; None writes none.
    """
    with quiet():
        to_transformers(stack).save_pretrained(folder)
        if tokenizer is not None:
            made = PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer.from_str(tokenizer), clean_up_tokenization_spaces=False
            )
            made.save_pretrained(str(folder))
