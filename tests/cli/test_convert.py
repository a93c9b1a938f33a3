"""`openkda convert`: both ways, a trained checkpoint, and one line for every wrong request."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan", reason="needs the torchtitan extra")
pytest.importorskip("transformers", reason="needs the transformers extra")

from safetensors.torch import load_file  # noqa: E402

from openkda.cli.main import main  # noqa: E402

# torch 2.13, torchdata and torchtitan warn of each other; none of it is ours to change.
pytestmark = pytest.mark.filterwarnings("ignore")


def convert(*argv: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["convert", *map(str, argv)])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from openkda.parity.reference import tiny_config, write_random

    folder = tmp_path_factory.mktemp("hf")
    write_random(tiny_config(), folder, seed=0)
    return folder


def test_there_and_back(hf: Path, tmp_path: Path) -> None:
    code, out, err = convert("--from", "hf", hf, "--to", "dcp", tmp_path / "dcp")
    assert (code, err) == (0, "")
    assert out == f"openkda convert: 88 tensors, dcp folder {tmp_path / 'dcp'}\n"
    assert convert("--from", "dcp", tmp_path / "dcp", "--to", "hf", tmp_path / "back")[0] == 0
    want, got = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / "back"))
    renamed = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): value for name, value in want.items()}
    assert renamed.keys() == got.keys()
    assert all(torch.equal(renamed[name], got[name]) for name in got)


@pytest.mark.parametrize(
    "config", ["kimi_linear_tiny_bounded", pytest.param("kimi_linear_tiny", marks=pytest.mark.slow)]
)
def test_trained_checkpoint_goes_to_hugging_face(config: str, tmp_path: Path) -> None:
    """What comes out of training is what the other side computes, with the gate it was trained with."""
    from openkda.parity import compare, load

    argv = ["train", "--config", config, "--steps", "1", "--output", str(tmp_path / "run")]
    small = ["--training.seq_len", "64", "--training.local_batch_size", "1"]
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {i} of a text that is long enough.\n\n" for i in range(200)))
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*argv, *small, "--data", str(text)]) == 0
    code, _, err = convert("--from", "dcp", tmp_path / "run", "--to", "hf", tmp_path / "hf")
    assert (code, err) == (0, "")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    bounded = config.endswith("bounded")
    assert written["model_type"] == ("kimi_linear_bounded" if bounded else "kimi_linear")
    assert written["dtype"] == "float32"
    pair = load(tmp_path / "hf")
    pair.prompts = pair.prompts[:2]
    assert pair.notes == []
    c = compare(pair)
    assert c.findings == []
    assert c.all.kl <= 1e-9


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--from", "hf", "x"], "the following arguments are required: --to; see openkda convert --help"),
        (["--from", "hf", "x", "--to", "hf", "y"], "--to must be the other format, dcp, got hf"),
        (["--from", "gguf", "x", "--to", "hf", "y"], "--from must be one of hf, dcp and a folder, got gguf"),
        (["--from", "hf", "/no/such", "--to", "dcp", "y"], "/no/such: no such folder"),
    ],
)
def test_wrong_request_is_one_line(argv: list[str], message: str) -> None:
    assert convert(*argv) == (2, "", f"openkda convert: {message}\n")


def test_folder_that_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    code, _, err = convert("--from", "hf", tmp_path, "--to", "dcp", tmp_path / "out")
    assert (code, err) == (2, f"openkda convert: {tmp_path}: must hold a config.json\n")
    code, _, err = convert("--from", "dcp", tmp_path, "--to", "hf", tmp_path / "out")
    assert (code, err) == (
        2,
        f"openkda convert: {tmp_path}: must hold .metadata and config.json, or be of openkda train\n",
    )


def test_missing_tensor_is_one_line_that_names_it(hf: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(hf / "model.safetensors")
    del tensors["model.layers.2.self_attn.dt_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((hf / "config.json").read_bytes())
    code, _, err = convert("--from", "hf", tmp_path, "--to", "dcp", tmp_path / "out")
    assert (code, err) == (2, f"openkda convert: {tmp_path}: missing: model.layers.2.self_attn.dt_bias\n")


def test_target_that_is_in_use_is_refused(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = convert("--from", "hf", hf, "--to", "dcp", tmp_path)
    assert (code, err) == (2, f"openkda convert: {tmp_path}: must be a new or empty folder\n")


def test_without_torchtitan_the_extra_is_named(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openkda.integrations import torchtitan

    def missing() -> None:
        raise ImportError("install the extra: pip install 'openkda[torchtitan]'")

    monkeypatch.setattr(torchtitan, "require_torchtitan", missing)
    code, _, err = convert("--from", "hf", hf, "--to", "dcp", tmp_path / "out")
    assert (code, err) == (2, "openkda convert: install the extra: pip install 'openkda[torchtitan]'\n")
