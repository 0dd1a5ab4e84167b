"""Language modelling of a text: packaged, a file, or a folder that `deepen data` made.

    text      |------------ trained on ------------|-- dev --|-- held out --|
    epoch     offset [w0] [w1] [w2] ...      windows of `context` tokens in an order of their own, each target once

What is held out is read in windows that overlap by half: only the second half of each is asked for, so every token is
predicted from at least half a context. The same bytes are what an n-gram is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer

from deepen.errors import DataError
from deepen.tasks.batch import IGNORED, Batch
from deepen.tasks.kneser_ney import KneserNey
from deepen.tasks.packages import digest_of
from deepen.tasks.sources import read_source
from deepen.tasks.task import Data, Measure, Task, dice
from deepen.tasks.tokens import byte_tokenizer, encode, fit_bpe, id_type, token_spellings

DEV, HELD_OUT = "dev", "held_out"
TOKENS, TOKENIZER = "tokens.json", "tokenizer.json"
PARTS = ("train", DEV, HELD_OUT)


class Text(Task):
    """Predict the next token of a text.

    Attributes:
        source: `shakespeare`, `kjv`, `stdlib`, the path of a UTF-8 file, or a folder that `deepen data` made.
        tokens: `bytes`, or byte-pair encoding fitted to the part that is trained on; of a folder, what it has.
        vocabulary: tokens of the byte-pair encoding.
        context: tokens of a window.
        dev: share of the text to look at while training.
        held_out: share of the text, at its end, that is read once at the end.
        held_out_bytes: bytes of each of these to read, at most.
        ngram: the longest gram of a Kneser-Ney model to fit beside; 0 fits none.
    """

    about: ClassVar[str] = "the next byte or token of a text"

    name: Literal["text"] = "text"
    source: str = "shakespeare"
    tokens: Literal["bytes", "bpe"] = "bytes"
    vocabulary: int = Field(default=1024, ge=257)
    context: int = Field(default=256, ge=2)
    dev: float = Field(default=0.05, gt=0, lt=1)
    held_out: float = Field(default=0.05, gt=0, lt=1)
    held_out_bytes: int = Field(default=65536, ge=1)
    ngram: int = Field(default=0, ge=0, le=16)

    def data(self) -> TextData:
        folder = Path(self.source)
        prepared = read_folder(folder) if (folder / TOKENS).is_file() else self.prepare(read_source(self.source))
        return TextData(self, prepared)

    def prepare(self, text: bytes) -> Prepared:
        """Cuts a text into its parts and encodes them.

        Raises:
            DataError: a part is empty, or the text too short for the vocabulary.
        """
        at = [round(len(text) * (1 - self.dev - self.held_out)), round(len(text) * (1 - self.held_out))]
        ends = [0, *(_whole(text, max(place, 0)) for place in at), len(text)]
        parts = {name: text[start:end] for name, start, end in zip(PARTS, ends, ends[1:], strict=False)}
        if empty := [name for name in PARTS if not parts[name]]:
            raise DataError(
                f"{self.source}: {len(text)} bytes leave nothing for {empty[0]} with dev {self.dev:g} and held_out "
                f"{self.held_out:g}"
            )
        tokenizer = byte_tokenizer() if self.tokens == "bytes" else fit_bpe(parts["train"], self.vocabulary)
        return Prepared(tokenizer, {name: encode(tokenizer, part) for name, part in parts.items()})


@dataclass(frozen=True, eq=False)
class Prepared:
    """A text as ids.

    Attributes:
        tokenizer: whose ids they are.
        parts: [t] ids of `train`, `dev` and `held_out`.
    """

    tokenizer: Tokenizer
    parts: Mapping[str, NDArray[np.unsignedinteger]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Bytes of each token [v]."""
        return np.array([len(each) for each in self.spelled], np.int64)

    @cached_property
    def spelled(self) -> list[bytes]:
        """The bytes of each token [v]."""
        return token_spellings(self.tokenizer)

    def text(self, ids: NDArray[Any]) -> bytes:
        """The bytes that ids [t] stand for."""
        return b"".join(map(self.spelled.__getitem__, ids.tolist()))

    def write(self, folder: Path) -> None:
        """Writes the files into an empty folder."""
        for name, ids in self.parts.items():
            (folder / f"{name}.bin").write_bytes(np.ascontiguousarray(ids).tobytes())
        (folder / TOKENIZER).write_text(self.tokenizer.to_str(), encoding="utf-8")
        about = {
            "id_bytes": id_type(len(self.lengths)).itemsize,
            "tokens": {name: len(ids) for name, ids in self.parts.items()},
            "bytes": {name: int(self.lengths[ids].sum()) for name, ids in self.parts.items()},
            "vocabulary": len(self.lengths),
        }
        (folder / TOKENS).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def read_folder(folder: Path) -> Prepared:
    """What `deepen data` wrote; the ids stay on the disk and are mapped into memory.

    Raises:
        DataError: a file is missing or not what it says it is.
    """
    try:
        about = json.loads((folder / TOKENS).read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_str((folder / TOKENIZER).read_text(encoding="utf-8"))
        kind = np.dtype(f"<u{about['id_bytes']}")
        parts = {name: np.memmap(folder / f"{name}.bin", dtype=kind, mode="r") for name in PARTS}
        wrong = [name for name in PARTS if len(parts[name]) != about["tokens"][name]]
    # tokenizers raises Exception itself for what it cannot read
    except Exception as error:
        raise DataError(f"{folder}: not a folder that deepen data made: {error}; make it again") from error
    if wrong:
        raise DataError(
            f"{folder / wrong[0]}.bin has {len(parts[wrong[0]])} ids, {TOKENS} says otherwise; make it again"
        )
    return Prepared(tokenizer, parts)


class TextData(Data):
    """Windows of a text."""

    measure: Measure = "bits_per_byte"
    splits = (DEV, HELD_OUT)

    def __init__(self, task: Text, prepared: Prepared) -> None:
        self.task, self.prepared, self.ids = task, prepared, prepared.parts["train"]
        vocabulary = prepared.tokenizer.get_vocab_size()
        self.stack = {"vocabulary": vocabulary, "context": task.context, "causal": True}
        self.digest = digest_of(np.ascontiguousarray(self.ids).tobytes(), prepared.tokenizer.to_str().encode())
        self.tokenizer = prepared.tokenizer.to_str()
        self._orders: dict[tuple[int, int], tuple[int, NDArray[np.int64]]] = {}
        self.looked = {split: self._looked(split) for split in self.splits}
        if len(self.ids) < 2 * task.context:
            raise DataError(
                f"{task.source}: the part to train on has {len(self.ids)} tokens; expected at least twice a context of "
                f"{task.context}"
            )

    def batch(self, step: int, size: int, seed: int) -> Batch:
        context, rows = self.task.context, []
        # an epoch may end inside of a batch
        windows = self._windows
        for row in range(step * size, (step + 1) * size):
            offset, order = self._order(row // windows, seed)
            start = offset + int(order[row % windows]) * context
            rows.append(np.asarray(self.ids[start : start + context + 1], dtype=np.int64))
        return _shifted(np.stack(rows))

    @property
    def _windows(self) -> int:
        """Windows of an epoch, whatever its offset."""
        return (len(self.ids) - self.task.context) // self.task.context

    def _order(self, epoch: int, seed: int) -> tuple[int, NDArray[np.int64]]:
        """Where the windows of an epoch begin, and their order."""
        if (seed, epoch) not in self._orders:
            drawn = dice(seed, epoch)
            kept = {key: order for key, order in self._orders.items() if key == (seed, epoch - 1)}
            self._orders = {
                **kept,
                (seed, epoch): (int(drawn.integers(self.task.context)), drawn.permutation(self._windows)),
            }
        return self._orders[seed, epoch]

    def _looked(self, split: str) -> NDArray[np.int64]:
        """The ids [t] of a held-out part that are read.

        Raises:
            DataError: fewer than a window.
        """
        ids, context = self.prepared.parts[split], self.task.context
        taken = int(np.searchsorted(np.cumsum(self.prepared.lengths[ids]), self.task.held_out_bytes, side="right"))
        hop = context - context // 2
        windows = (taken - 1 - context) // hop + 1
        if taken <= context or windows < 1:
            raise DataError(f"{self.task.source}: the part {split} has {taken} tokens to read; expected more than a "
                            f"context of {context}: raise task.{split} or task.held_out_bytes")  # fmt: skip
        return np.asarray(ids[: (windows - 1) * hop + context + 1], dtype=np.int64)

    def held_out(self, split: str, size: int) -> Iterator[Batch]:
        ids, context = self.looked[split], self.task.context
        kept = context // 2
        starts = range(0, len(ids) - context, context - kept)
        for at in range(0, len(starts), size):
            batch = _shifted(np.stack([ids[start : start + context + 1] for start in starts[at : at + size]]))
            batch.targets[:, :kept] = IGNORED
            asked = batch.targets[batch.targets != IGNORED].numpy()
            yield Batch(inputs=batch.inputs, targets=batch.targets, bytes=int(self.prepared.lengths[asked].sum()))

    def peers(self) -> Mapping[str, float]:
        """Bits a byte of an n-gram on what is asked for; its order is chosen on the dev part."""
        if not self.task.ngram:
            return {}
        fitted = KneserNey(self.prepared.text(np.asarray(self.ids)), self.task.ngram)
        order, _ = fitted.best_order(*self._asked(DEV))
        text, start = self._asked(HELD_OUT)
        return {"ngram_order": order, "ngram_bits_per_byte": fitted.bits(text, order, start)}

    def _asked(self, split: str) -> tuple[bytes, int]:
        """The bytes of what is read of a part, and where those begin that are asked for."""
        ids = self.looked[split]
        return self.prepared.text(ids), int(self.prepared.lengths[ids[: self.task.context // 2 + 1]].sum())


def _shifted(rows: NDArray[np.int64]) -> Batch:
    """Inputs and targets of windows [b, t + 1]."""
    windows = torch.from_numpy(rows)
    return Batch(inputs=windows[:, :-1].contiguous(), targets=windows[:, 1:].clone())


def _whole(text: bytes, place: int) -> int:
    """The next place at which a character begins."""
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return place
