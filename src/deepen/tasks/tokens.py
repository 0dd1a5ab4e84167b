"""Text as token ids: bytes, or byte-pair encoding fitted here; and files of ids that are mapped into memory.

    FOLDER/train.bin      ids, unsigned, little-endian, 1, 2 or 4 bytes each
          /held_out.bin
          /tokens.json    bytes of an id, vocabulary, digest, bytes of the texts
          /tokenizer.json of the library tokenizers

Byte-pair encoding: Sennrich, Haddow, Birch, Neural Machine Translation of Rare Words with Subword Units,
arXiv:1508.07909.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deepen.errors import DataError

BYTES = 256
# Text goes to the tokenizer in pieces, which end at a line, so that memory stays small.
PIECE = 1 << 20


def byte_tokenizer() -> Tokenizer:
    """One token a byte, whose id is its value."""
    alphabet = byte_letters()
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    return made


def fit_bpe(text: bytes, vocabulary: int) -> Tokenizer:
    """Byte-pair encoding of a UTF-8 text, with so many tokens; the first 256 are the bytes.

    Raises:
        DataError: fewer tokens than bytes, or more than the text gives.
    """
    if vocabulary < BYTES:
        raise DataError(f"a vocabulary of {vocabulary} has no room for the {BYTES} bytes")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=byte_letters(), show_progress=False, special_tokens=[]
    )
    made.train_from_iterator(_pieces(text), trainer)
    if made.get_vocab_size() != vocabulary:
        raise DataError(f"the text gives {made.get_vocab_size()} tokens, not {vocabulary}; ask for fewer")
    return made


def encode(tokenizer: Tokenizer, text: bytes) -> NDArray[np.unsignedinteger]:
    """The ids [t] of a UTF-8 text."""
    kind = id_type(tokenizer.get_vocab_size())
    if tokenizer.get_vocab_size() == BYTES:
        # ids are the bytes themselves, and the tokenizer takes a second a megabyte to say so
        return np.frombuffer(text, kind)
    found = [np.array(tokenizer.encode(piece).ids, dtype=kind) for piece in _pieces(text)]
    return np.concatenate(found) if found else np.zeros(0, kind)


def id_type(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that holds every id."""
    return np.dtype("<u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


def token_spellings(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of text that each token [v] stands for."""
    byte = {letter: value for value, letter in enumerate(byte_letters())}
    names = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    return [bytes(byte[letter] for letter in name or "") for name in names]


@lru_cache
def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it can be seen, else the next free."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(BYTES) if byte not in seen]
    return [chr(byte if byte in seen else BYTES + hidden.index(byte)) for byte in range(BYTES)]


def _pieces(text: bytes) -> list[str]:
    """A text in pieces that end with a line where there is one."""
    found, at = [], 0
    while at < len(text):
        end = min(at + PIECE, len(text))
        if end < len(text):
            line = text.rfind(b"\n", at, end)
            end = line + 1 if line > at else end
            # not inside of a character
            while end < len(text) and text[end] & 0xC0 == 0x80:
                end += 1
        found.append(text[at:end].decode("utf-8"))
        at = end
    return found
