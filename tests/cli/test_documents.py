"""Reading local text: what counts as a document, what is held out, and what is said when it cannot be read."""

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="the loader lives in the torchtitan integration")

from openkda.integrations.torchtitan import documents as docs
from openkda.integrations.torchtitan.documents import DataError, Document, read_documents, split_documents


def texts(path: Path) -> list[str]:
    return [d.text for d in read_documents(path)]


# What is a document.


def test_default_text_is_the_reference_that_ships_with_python() -> None:
    documents = read_documents(None)
    assert "specialnames" in [d.name for d in documents]
    assert sum(len(d.text) for d in documents) > 300_000


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert texts(tmp_path / "a.txt") == ["one\ntwo\n"]


def test_folder_is_read_recursively_in_order_of_path_and_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "sub/deep/c.md", "a.txt", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    documents = read_documents(tmp_path)
    assert [d.name for d in documents] == ["a.txt", "b.txt", "sub/deep/c.md"]
    assert [d.text for d in documents] == ["a.txt", "b.txt", "sub/deep/c.md"]


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert texts(tmp_path / "a.txt") == ["hello"]


def test_long_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "MAX_DOCUMENT_CHARS", 10)
    (tmp_path / "a.txt").write_text("12345\n789\nabcdefghijklmno\nq")
    assert texts(tmp_path / "a.txt") == ["12345\n789\n", "abcdefghij", "klmno\nq"]


@pytest.mark.parametrize("name", ["c4.jsonl", "c4-train.00000-of-01024.json.gz", "c4.ndjson"])
def test_json_lines_are_one_document_each(tmp_path: Path, name: str) -> None:
    rows = [{"text": "first", "url": "u"}, {"text": "line\u2028separator"}, {"text": "über"}]
    data = "\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n"
    (tmp_path / name).write_bytes(gzip.compress(data.encode()) if name.endswith(".gz") else data.encode())
    assert texts(tmp_path / name) == ["first", "line\u2028separator", "über"]
    assert [d.name for d in read_documents(tmp_path / name)] == [f"{name}:1", f"{name}:2", f"{name}:3"]


def _dataset(rows: int) -> "object":
    return pytest.importorskip("datasets").Dataset.from_dict({"text": [f"row {i}" for i in range(rows)]})


@pytest.mark.parametrize("form", ["save_to_disk", "split", "parquet file", "parquet folder", "arrow file"])
def test_hugging_face_dataset_is_one_document_a_row(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    table = _dataset(3)
    path = tmp_path / "data"
    if form == "save_to_disk":
        table.save_to_disk(str(path))
    elif form == "split":
        datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(path))
    elif form == "arrow file":
        table.save_to_disk(str(tmp_path / "saved"))
        path = next((tmp_path / "saved").glob("*.arrow"))
    else:
        path.mkdir()
        table.to_parquet(str(path / "a.parquet"))
        path = path / "a.parquet" if form == "parquet file" else path
    assert [d.text for d in read_documents(path)] == ["row 0", "row 1", "row 2"]


def test_spread_cuts_only_when_a_rank_would_have_nothing() -> None:
    documents = [Document("a", "12345\n" * 40), Document("b", "x\n")]
    assert docs.spread(documents, 2) is documents
    pieces = docs.spread(documents, 3)
    assert len(pieces) >= 12
    assert "".join(d.text for d in pieces) == "12345\n" * 40 + "x\n"
    assert all(d.text.endswith("\n") for d in pieces)


# What is held out.


def corpus_of(sizes: dict[str, int]) -> list[Document]:
    return [Document(name, f"{name} " * (size // (len(name) + 1))) for name, size in sizes.items()]


def test_default_text_holds_out_five_percent_by_document() -> None:
    documents = read_documents(None)
    corpus = split_documents(documents)
    total = sum(len(d.text.encode()) for d in documents)
    held = sum(len(d.text.encode()) for d in corpus.heldout)
    assert 0.045 * total < held <= 0.05 * total
    assert not {d.name for d in corpus.heldout} & {d.name for d in corpus.train}


def test_split_is_the_same_every_time_and_in_any_order() -> None:
    documents = corpus_of({f"doc{i}": 100 + i for i in range(100)})
    first, again = split_documents(documents), split_documents(documents[::-1])
    assert {d.name for d in first.heldout} == {d.name for d in again.heldout}
    assert len(first.heldout) in (4, 5, 6)


def test_paragraph_of_heldout_text_is_taken_out_of_training_text() -> None:
    shared = "This paragraph stands in every document, word for word, as a licence header does."
    documents = [Document(f"d{i}", f"{shared}\n\nonly in {i}, " + "x" * 60) for i in range(40)]
    corpus = split_documents(documents)
    assert corpus.heldout
    assert all(shared in d.text for d in corpus.heldout)
    assert all(shared not in d.text and "only in" in d.text for d in corpus.train)


def test_end_of_each_document_is_held_out_when_no_document_fits() -> None:
    book = "".join(f"line {i}\n" for i in range(1000))
    corpus = split_documents([Document("book", book)])
    assert [d.name for d in corpus.heldout] == ["book (end)"]
    assert corpus.train[0].text + corpus.heldout[0].text == book
    assert corpus.train[0].text.endswith("\n")
    assert 0.05 <= len(corpus.heldout[0].text) / len(book) < 0.06


def test_rows_of_a_dataset_are_split_without_reading_them(tmp_path: Path) -> None:
    _dataset(105).save_to_disk(str(tmp_path / "d"))
    corpus = split_documents(read_documents(tmp_path / "d"))
    held = [corpus.heldout[i].text for i in range(len(corpus.heldout))]
    train = [corpus.train[i].text for i in range(len(corpus.train))]
    assert held == [f"row {i}" for i in (19, 39, 59, 79, 99)]
    assert sorted(held + train) == sorted(f"row {i}" for i in range(105))
    with pytest.raises(IndexError):
        corpus.train[len(corpus.train)]


def test_split_rejects_a_fraction_outside_0_1() -> None:
    with pytest.raises(ValueError, match=r"split_documents: fraction must be between 0 and 1, got 1\.5"):
        split_documents([Document("a", "text")], 1.5)


# What cannot be read. Every message names the file, and the place in it.


def message(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(read_documents(path))
    return str(caught.value).replace(str(path), "PATH")


def test_missing_path(tmp_path: Path) -> None:
    assert message(tmp_path / "none") == "PATH: no such file or folder"


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert message(tmp_path / "a.txt") == "PATH: holds no text"


def test_empty_folder(tmp_path: Path) -> None:
    assert message(tmp_path) == "PATH: holds no text"


def test_undecodable_file_names_the_byte_and_its_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good text " + b"\xff" + b" more")
    assert message(tmp_path / "a.txt") == "PATH: is not UTF-8 text: byte 0xff at offset 10"


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-12])
    assert message(path).startswith("PATH: cannot be read: ")
    path.write_bytes(b"plain text")
    assert message(path).startswith("PATH: cannot be read: Not a gzipped file")


@pytest.mark.parametrize("line", ['{"txt": "b"}', '{"text": 3}', '["text"]', '"text"'])
def test_json_line_without_text_names_the_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n' + line + "\n")
    expected = 'PATH: line 3 has no "text" string; each line must be an object like {"text": "..."}'
    assert message(tmp_path / "a.jsonl") == expected


def test_line_that_is_not_json_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert message(tmp_path / "a.jsonl").startswith("PATH: line 2 is not JSON: Expecting value (column ")


@pytest.mark.parametrize(
    "line", ["[" * 200_000, '{"text": "a", "n": ' + "9" * 5000 + "}"], ids=["nested", "long number"]
)
def test_line_that_python_does_not_parse_names_the_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    assert message(tmp_path / "a.jsonl").startswith("PATH: line 2 cannot be read: ")


def test_line_with_half_a_surrogate_pair_names_the_line(tmp_path: Path) -> None:
    whole = '{"text": "\\ud83d\\ude00"}\n'
    (tmp_path / "a.jsonl").write_text(whole)
    assert [d.text for d in read_documents(tmp_path / "a.jsonl")] == ["\U0001f600"]
    (tmp_path / "a.jsonl").write_text(whole + '{"text": "\\ud83d"}\n')
    expected = 'PATH: line 2 has half a surrogate pair in "text", which no UTF-8 text can hold'
    assert message(tmp_path / "a.jsonl") == expected


def test_dataset_without_text_column_lists_its_columns(tmp_path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_dict({"body": ["a"], "id": [1]}).save_to_disk(str(tmp_path / "d"))
    assert message(tmp_path / "d") == 'PATH: has no column "text"; its columns are body, id'


def test_dataset_without_train_split_lists_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(str(tmp_path / "d"))
    assert message(tmp_path / "d") == 'PATH: has no split "train"; it has test'


def test_dataset_row_without_text_names_the_row(tmp_path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_dict({"text": ["a", None]}).save_to_disk(str(tmp_path / "d"))
    assert message(tmp_path / "d") == 'PATH: row 1 has no "text" string, but NoneType'


def test_folder_of_mixed_tables(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.arrow"):
        (tmp_path / name).write_bytes(b"x")
    assert message(tmp_path) == "PATH: holds both .parquet and .arrow files; point --data at one kind"


def test_damaged_table(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    assert message(tmp_path / "a.parquet").startswith("PATH: cannot be read as a Hugging Face dataset: ")
