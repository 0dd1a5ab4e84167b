"""Tiny checkpoints with a tokenizer, and runs of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from deepen.checkpoint.tiny import tiny_checkpoint

CHAT = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}<a>"
# Every byte a token would need 256; the tiny models have 96 ids, so text is these letters.
LETTERS = "abcdefghijklmnopqrstuvwxyz .,;:!?\n-'ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789é"
TEXT = "the king is dead, long live the king. who goes there? a friend of the realm.\n" * 12


def tokenizer(*, bos: bool = False, chat: bool = False, encoder: bool = False) -> PreTrainedTokenizerFast:
    """One token a letter, ids 0-5 special."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<u>", "<a>"]
    vocabulary = {token: at for at, token in enumerate([*special, *LETTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.add_special_tokens(special)
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if encoder:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    if chat:
        made.chat_template = CHAT
    return made


def checkpoint(
    folder: Path, family: str = "llama", *, chat: bool = False, bos: bool = False, encoder: bool = False, **changes: int
) -> Path:
    """A tiny checkpoint with its tokenizer."""
    tiny_checkpoint(folder, family, **changes)
    tokenizer(chat=chat, bos=bos, encoder=encoder).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Ran:
    """What a run of the command gave."""

    status: int
    out: str
    err: str


def deepen(*arguments: str | Path, env: dict[str, str] | None = None, **options: Any) -> Ran:
    """Runs `python -m deepen` in a process of its own."""
    command = [sys.executable, "-m", "deepen", *map(str, arguments)]
    merged = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=merged, check=False, **options)
    return Ran(done.returncode, done.stdout, done.stderr)
