"""Packing documents into sequences: what the model sees, how ranks share it, and how a resumed stream goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan", reason="the loader lives in the torchtitan integration")

from openkda.integrations.torchtitan.data import (  # noqa: E402
    PackedStream,
    PaddedSequences,
    TextDataLoader,
    count_heldout,
    first_bytes,
)
from openkda.integrations.torchtitan.documents import DataError, Document  # noqa: E402
from openkda.integrations.torchtitan.tokenizer import BOS, EOS, ByteTokenizer, FileTokenizer  # noqa: E402

# torchdata 0.11 calls a function that torch 2.13 announces to remove; it has no effect on what is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

IGNORE = -100


def documents(*texts: str) -> list[Document]:
    return [Document(str(i), text) for i, text in enumerate(texts)]


def stream(texts: list[str], seq_len: int, **options: Any) -> PackedStream:
    return PackedStream(documents(*texts), ByteTokenizer(), seq_len, **options)


def take(source: PackedStream, count: int) -> list[tuple[list[int], list[int], list[int]]]:
    iterator = iter(source)
    samples = [next(iterator) for _ in range(count)]
    return [(s["input"].tolist(), labels.tolist(), s["positions"].tolist()) for s, labels in samples]


def loader(path: Path | None = None, **options: Any) -> TextDataLoader:
    runtime = dict(dp_world_size=1, dp_rank=0, tokenizer=ByteTokenizer(), seq_len=64, local_batch_size=2)
    runtime |= {k: options.pop(k) for k in list(options) if k in runtime}
    return TextDataLoader.Config(dataset_path=path and str(path), **options).build(**runtime)


# Tokens.


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [BOS, 97, 195, 169, EOS]
    assert tokenizer.encode("a", add_bos=False, add_eos=False) == [97]
    assert tokenizer.decode([BOS, 97, 195, 169, EOS, 195]) == "aé\ufffd"
    assert tokenizer.get_vocab_size() == 260


def test_file_tokenizer_reads_tokenizer_json_and_finds_its_marks(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.add_special_tokens(["<s>", "</s>"])
    built.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer.Config(path=str(tmp_path / "tokenizer.json")).build(tokenizer_path="")
    assert tokenizer.encode("hello world") == [1, 3, 4, 2]
    assert tokenizer.decode([1, 3, 4, 2]) == "hello world"
    assert tokenizer.get_vocab_size() == 5


def test_file_tokenizer_names_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: no such tokenizer file"):
        FileTokenizer.Config(path=str(tmp_path / "none.json")).build(tokenizer_path="")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(DataError, match=r"t\.json: is not a tokenizer\.json: "):
        FileTokenizer.Config(path=str(tmp_path / "t.json")).build(tokenizer_path="")


# Packing.


def test_document_is_shifted_inside_itself_and_continues_at_position_zero() -> None:
    first, second = take(stream(["abcdef"], 4), 2)
    assert first == ([BOS, 97, 98, 99], [97, 98, 99, 100], [0, 1, 2, 3])
    # "ef" and the end mark finish the document; the next epoch begins with the same one.
    assert second == ([100, 101, 102, BOS], [101, 102, EOS, 97], [0, 1, 2, 0])


def test_no_label_crosses_a_document_boundary() -> None:
    texts = ["a" * 5, "b" * 9, "c" * 2]
    for inputs, labels, positions in take(stream(texts, 8), 30):
        for i, (x, y, p) in enumerate(zip(inputs, labels, positions, strict=True)):
            assert x != EOS
            assert y in ({97, 98, 99} if x == BOS else {x, EOS})
            assert p == 0 or p == positions[i - 1] + 1
            assert (x == BOS) <= (p == 0)


def test_empty_document_adds_only_its_marks() -> None:
    inputs, labels, _ = take(stream(["", "ab"], 8), 1)[0]  # two epochs of (BOS -> EOS) and (BOS a b -> a b EOS)
    assert sorted(inputs) == [97, 97, 98, 98, BOS, BOS, BOS, BOS]
    assert sorted(labels) == [97, 97, 98, 98, EOS, EOS, EOS, EOS]


def test_every_epoch_holds_every_token_once_in_another_order() -> None:
    texts = [chr(97 + i) * 7 for i in range(12)]  # 8 labels a document, 96 an epoch
    epochs = [take(s, 8) for s in [stream(texts, 12, seed=3)] for _ in range(3)]
    seen = [[t for _, labels, _ in epoch for t in labels] for epoch in epochs]
    assert all(sorted(e) == sorted(seen[0]) and len(e) == 96 for e in seen)
    assert seen[0] != seen[1] != seen[2]
    assert take(stream(texts, 12, seed=3), 8) == epochs[0]
    assert take(stream(texts, 12, seed=4), 8) != epochs[0]


def test_ranks_share_the_documents_of_an_epoch() -> None:
    texts = [chr(97 + i) * 7 for i in range(6)]
    labels = [
        {t for _, ls, _ in take(stream(texts, 8, rank=rank, world_size=3), 2) for t in ls} - {EOS} for rank in range(3)
    ]
    assert [len(part) for part in labels] == [2, 2, 2]
    assert set.union(*labels) == {97 + i for i in range(6)}


def test_stream_resumes_at_the_next_token_from_any_place() -> None:
    texts = ["abcdefg" * k for k in (1, 5, 2, 40)]
    whole = take(stream(texts, 16, seed=1), 60)
    running = stream(texts, 16, seed=1)
    for count in range(1, 60):
        take(running, 1)
        state = json.loads(json.dumps(running.state_dict()))
        resumed = stream(texts, 16, seed=1)
        resumed.load_state_dict(state)
        assert take(resumed, 60 - count) == whole[count:]


# Held-out text, padded.


def test_padded_sequences_hold_each_label_once_and_padding_is_ignored() -> None:
    data = PaddedSequences(documents("abc", "defgh"), ByteTokenizer(), 8)
    samples = [data[i] for i in range(len(data))]
    labels = [t for _, ls in samples for t in ls.tolist()]
    assert labels == [97, 98, 99, EOS, 100, 101, 102, 103, 104, EOS] + [IGNORE] * 6
    assert samples[1][0]["positions"].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_padded_sequences_are_as_many_on_every_rank(world_size: int) -> None:
    texts = ["abcdefghij" * 3]
    ranks = [
        PaddedSequences(documents(*texts), ByteTokenizer(), 8, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({len(part) for part in ranks}) == 1
    count = sum(int((part[i][1] != IGNORE).sum()) for part in ranks for i in range(len(part)))
    assert count == 31


def test_first_bytes_keeps_at_least_one_document() -> None:
    assert [d.text for d in first_bytes(documents("aaaa", "bb", "c"), 6)] == ["aaaa", "bb"]
    assert [d.text for d in first_bytes(documents("aaaa", "bb"), 1)] == ["aaaa"]


# The loader as torchtitan builds it.


def test_loader_batches_have_torchtitans_shape() -> None:
    inputs, labels = next(iter(loader()))
    assert set(inputs) == {"input", "positions"}
    assert [t.shape for t in (inputs["input"], inputs["positions"], labels)] == [torch.Size([2, 64])] * 3
    assert all(t.dtype == torch.int64 for t in (inputs["input"], inputs["positions"], labels))


def test_loader_state_goes_through_a_checkpoint() -> None:
    first = loader(seed=5)
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    expected = [next(iterator) for _ in range(5)]
    second = loader(seed=5)
    second.load_state_dict(state)
    for (inputs, labels), (got_inputs, got_labels) in zip(expected, second, strict=False):
        assert torch.equal(inputs["input"], got_inputs["input"])
        assert torch.equal(labels, got_labels)


def test_heldout_loader_reads_exactly_what_count_heldout_counts() -> None:
    config = TextDataLoader.Config(split="heldout", infinite=False)
    labels, size = count_heldout(config, ByteTokenizer())
    batches = config.build(dp_world_size=1, dp_rank=0, tokenizer=ByteTokenizer(), seq_len=256, local_batch_size=4)
    assert sum(int((ls != IGNORE).sum()) for _, ls in batches) == labels
    assert labels - size == len(config_documents(config))  # one end mark a document


def config_documents(config: TextDataLoader.Config) -> list[Document]:
    from openkda.integrations.torchtitan.data import load_corpus

    return list(load_corpus(config.dataset_path, config.heldout_fraction).heldout)


def test_edited_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a" * 4000)
    assert 97 in next(iter(loader(path)))[1]
    path.write_text("b" * 5000)
    assert 97 not in next(iter(loader(path)))[1]


def test_text_shorter_than_one_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(DataError) as caught:
        loader(tmp_path / "a.txt", seq_len=128)
    assert str(caught.value) == (
        f"{tmp_path / 'a.txt'}: 96 tokens to train on are fewer than one sequence of 128; "
        "give more text, or a smaller --training.seq_len"
    )


def test_one_document_is_shared_by_ranks(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {i}\n" for i in range(1000)))
    streams = [loader(tmp_path / "book.txt", dp_world_size=4, dp_rank=rank).dataset for rank in range(4)]
    shares = [{s.documents[i].text for i in s._order()} for s in streams]
    whole = {d.text for d in streams[0].documents}
    assert set.union(*shares) == whole
    assert sum(map(len, shares)) == len(whole)
    assert all(len(share) >= 4 for share in shares)


def test_text_shorter_than_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 40)
    with pytest.raises(DataError, match=r"a\.txt: is too short for 64 data-parallel ranks"):
        loader(tmp_path / "a.txt", dp_world_size=64, seq_len=8)


def test_another_number_of_data_parallel_ranks_cannot_go_on_in_the_text():
    loader, tokenizer = TextDataLoader.Config(), ByteTokenizer()
    options = {"tokenizer": tokenizer, "seq_len": 64, "local_batch_size": 1, "dp_rank": 0}
    saved = loader.build(**options, dp_world_size=2).state_dict()
    loader.build(**options, dp_world_size=2).load_state_dict(saved)
    with pytest.raises(DataError, match="a checkpoint of 2 data-parallel ranks must go on with as many, got 4"):
        loader.build(**options, dp_world_size=4).load_state_dict(saved)
