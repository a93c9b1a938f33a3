"""`openkda train` and `generate` for real, on a few kilobytes of text: train, resume, interrupt, continue a prompt."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan", reason="training is torchtitan's")

from openkda.cli.main import main  # noqa: E402

# torch 2.13, torchdata and torchtitan warn of each other (deprecations, what a CPU lacks); none of it is ours to
# change, and a run of the command collects warnings in its log file.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = ["--training.seq_len", "64", "--training.local_batch_size", "2"]
LAST_LINE = re.compile(
    r"openkda train: loss (\d+\.\d{4}) -> (\d+\.\d{4}), (\d+\.\d{3}) bits/byte on held-out text, "
    r"([\d,]+) tokens/s, checkpoint (.+)"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(topics["yield"] + topics["with"] + topics["comparisons"])
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    """Four steps with a checkpoint after two, and what was printed. Shared: tests copy what they change."""
    import contextlib
    import io

    output = tmp_path_factory.mktemp("run") / "out"
    argv = ["train", "--config", "kimi_linear_tiny", "--data", str(text), "--steps", "4", "--output", str(output)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*argv, *SMALL, "--checkpoint.interval", "2"]) == 0
    return output, printed.getvalue()


def losses(output: Path) -> dict[int, float]:
    """Training loss by step, from the TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in sorted({p.parent for p in (output / "tb").rglob("events.*")}):
        events = EventAccumulator(str(folder))
        events.Reload()
        if "loss_metrics/global_avg_loss" in events.Tags()["scalars"]:
            found |= {e.step: e.value for e in events.Scalars("loss_metrics/global_avg_loss")}
    return found


def weights(checkpoint: Path) -> dict[str, Any]:
    """All tensors of a checkpoint: model, optimizer moments."""
    from torch.distributed.checkpoint import FileSystemReader, load

    reader = FileSystemReader(str(checkpoint))
    shapes = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in shapes.items()
        if hasattr(meta, "properties")
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def test_last_line_and_the_lines_before_it(run: tuple[Path, str]) -> None:
    output, printed = run
    lines = printed.splitlines()
    first, last, bits, _, checkpoint = LAST_LINE.fullmatch(lines[-1]).groups()
    assert checkpoint == str(output / "checkpoint" / "step-4")
    assert float(last) < float(first)
    before = next(line for line in lines if line.startswith("held-out text, before step 1: "))
    after = next(line for line in lines if line.startswith("held-out text, after 4 steps: "))
    assert float(before.split()[5]) > float(bits) == float(after.split()[5])
    assert before.split("(")[1] == after.split("(")[1]  # the bigram figure does not depend on the model
    assert sum(line.startswith("openkda train: ") for line in lines) == 1


def test_untrained_model_knows_about_nothing(run: tuple[Path, str]) -> None:
    # Chance is log2(260) = 8.02 bits; a fresh model is a little worse than that, and not below it.
    before = re.search(r"before step 1: ([\d.]+) bits/byte", run[1])
    assert math.log2(250) < float(before.group(1)) < 10


def test_output_folder_holds_checkpoints_log_and_tensorboard(run: tuple[Path, str]) -> None:
    output, printed = run
    assert sorted(p.name for p in (output / "checkpoint").iterdir()) == ["openkda.json", "step-2", "step-4"]
    assert "Training starts at step 1" in (output / "train.log").read_text()
    assert "Training starts" not in printed
    assert sorted(losses(output)) == [1, 2, 3, 4]


def test_two_and_two_steps_are_four_steps_to_the_bit(run: tuple[Path, str], tmp_path: Path) -> None:
    whole = run[0]
    resumed = tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoint" / "step-4")
    shutil.rmtree(resumed / "tb")
    assert main(["train", "--resume", str(resumed)]) == 0
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 2}
    expected, got = (weights(folder / "checkpoint" / "step-4") for folder in (whole, resumed))
    assert len(expected) > 100  # parameters and two moments of each
    assert {name for name in expected if not torch.equal(expected[name], got[name])} == set()


def test_finished_run_is_left_as_it_is(
    run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "done"
    shutil.copytree(run[0], done)
    assert main(["train", "--resume", str(done)]) == 2
    assert capsys.readouterr().err == (f"openkda train: {done} is already at step 4 of 4; ask for more with --steps\n")


def test_generate_is_repeatable_and_starts_with_the_prompt(
    run: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        argv = ["generate", "--checkpoint", str(run[0]), "--prompt", "The yïeld", "--max-new-tokens", "30"]
        assert main([*argv, "--seed", seed, "--top-k", "50"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("The yïeld")
    assert texts[0] == texts[1] != texts[2]


def test_greedy_text_is_the_full_forwards_argmax(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    from openkda.cli import decoding
    from openkda.cli.record import find_checkpoint

    step = run[0] / "checkpoint" / "step-2"
    argv = ["generate", "--checkpoint", str(step), "--prompt", "yield", "--max-new-tokens", "12", "--temperature", "0"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    model, tokenizer = decoding.load(find_checkpoint(step))
    ids = tokenizer.encode("yield", add_bos=True, add_eos=False)
    for _ in range(12):
        tokens = torch.tensor([ids])
        positions = torch.arange(len(ids))[None]
        with torch.no_grad():
            logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_id:
            break
    assert shown == tokenizer.decode(ids) + "\n"


def test_generated_tokens_have_the_log_probabilities_of_training_to_the_bit(
    run: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from openkda.cli import decoding
    from openkda.cli.record import find_checkpoint

    seen: list[torch.Tensor] = []
    shipped = decoding.chooser

    def recording(*args: Any) -> Any:
        choose = shipped(*args)
        return lambda logits: (seen.append(logits), choose(logits))[1]

    monkeypatch.setattr(decoding, "chooser", recording)
    prompt = "The yield statement is semantically equivalent to a yield exp"  # 61 bytes: a block ends behind it
    argv = ["generate", "--checkpoint", str(run[0]), "--prompt", prompt, "--max-new-tokens", "9", "--temperature", "0"]
    assert main([*argv, "--batch-invariant"]) == 0
    capsys.readouterr()
    model, tokenizer = decoding.load(find_checkpoint(run[0]), batch_invariant=True)
    model.train()
    ids = tokenizer.encode(prompt, add_bos=True, add_eos=False)
    new = [int(logits.argmax()) for logits in seen]
    tokens = torch.tensor([ids + new])
    trained = model(torch.cat([tokens, torch.zeros_like(tokens)]))  # in a batch, and with gradients
    assert trained.requires_grad
    assert torch.equal(trained[0, len(ids) - 1 : -1], torch.cat(seen))
    taken = torch.tensor(new)[:, None]
    rollout, training = (x.log_softmax(-1).gather(-1, taken) for x in (torch.cat(seen), trained[0, len(ids) - 1 : -1]))
    assert torch.equal(rollout, training)


def test_tokenizer_file_is_remembered_and_the_vocabulary_grows_to_it(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.ByteLevelBPETokenizer()
    built.train_from_iterator([text.read_text()], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    built.save(str(tmp_path / "bpe.json"))
    output = tmp_path / "out"
    argv = ["train", "--config", "kimi_linear_tiny", "--data", str(text), "--tokenizer", str(tmp_path / "bpe.json")]
    assert main([*argv, "--steps", "1", "--output", str(output), *SMALL]) == 0
    # Chance over 400 tokens, of which one stands for about two bytes: far below the 8 bits a byte of byte tokens.
    before = re.search(r"before step 1: ([\d.]+) bits/byte", capsys.readouterr().out)
    assert 3 < float(before.group(1)) < 6.5
    (tmp_path / "bpe.json").unlink()
    assert weights(output / "checkpoint" / "step-1")["tok_embeddings.weight"].shape[0] == 400
    assert main(["generate", "--checkpoint", str(output), "--prompt", "The", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("The")


def test_diverged_run_is_told_in_one_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from openkda.integrations.torchtitan import config_registry

    adamw = config_registry.adamw
    monkeypatch.setattr(config_registry, "adamw", lambda **options: adamw(**options | {"lr": 1e30}))
    argv = [
        "train",
        "--config",
        "kimi_linear_tiny",
        "--data",
        str(text),
        "--steps",
        "9",
        "--output",
        str(tmp_path / "o"),
    ]
    assert main([*argv, *SMALL, "--lr_scheduler.warmup_steps", "1"]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"openkda train: Loss is not finite \(global_avg_loss=nan\) at step \d+\. Stopping training\. "
        r"Try a smaller learning rate\.\n",
        err,
    )


# Interruption.


def start(text: Path, output: Path) -> subprocess.Popen[str]:
    argv = ["train", "--config", "kimi_linear_tiny", "--data", str(text), "--steps", "100000", "--output", str(output)]
    return subprocess.Popen(
        [sys.executable, "-m", "openkda.cli", *argv, *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


def stop_after_first_step(process: subprocess.Popen[str], kind: signal.Signals) -> tuple[int, str, str]:
    for line in process.stdout:
        if line.startswith("step 1/"):
            process.send_signal(kind)
            break
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("kind", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_run_saves_and_says_how_to_go_on(text: Path, tmp_path: Path, kind: signal.Signals) -> None:
    output = tmp_path / "out"
    code, out, err = stop_after_first_step(start(text, output), kind)
    assert (code, err) == (130, "")
    last = re.fullmatch(
        r"openkda train: stopped at step (\d+) of 100000, checkpoint (.+); go on with: openkda train --resume (.+)",
        out.splitlines()[-1],
    )
    step = int(last.group(1))
    assert last.group(2) == str(output / "checkpoint" / f"step-{step}")
    assert last.group(3) == str(output)
    assert main(["train", "--resume", str(output), "--steps", str(step + 1)]) == 0
    assert (output / "checkpoint" / f"step-{step + 1}" / ".metadata").is_file()


# Wrong requests that take torchtitan to find out.


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: object) -> str:
    output = ["--output", str(tmp_path / "out")]
    assert main(["train", "--config", "kimi_linear_tiny", *output, *[str(a) for a in argv]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.rstrip("\n").replace(str(tmp_path), "TMP")


def test_unknown_configuration_lists_the_known_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "--config", "big", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "openkda train: --config must be one of kimi_linear_48b_a3b, kimi_linear_debug, kimi_linear_tiny, "
        "kimi_linear_tiny_bounded, got big\n"
    )


def test_unknown_module(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = refused(capsys, tmp_path, "--module", "no.such")
    assert message == "openkda train: --module no.such: has no config_registry"


def test_unknown_option_suggests_a_known_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, tmp_path, "--training.stepz", "5") == (
        "openkda train: Unrecognized options: --training.stepz, 5; perhaps you meant --training.steps; see --help-all"
    )


def test_bad_value_of_an_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, tmp_path, "--training.steps", "few") == (
        "openkda train: Error parsing --training.steps: invalid literal for int() with base 10: 'few'; see --help-all"
    )


def test_options_that_contradict_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = refused(capsys, tmp_path, "--training.global_batch_size", "3")
    assert message.startswith("openkda train: global batch size must be multiple of local batch size")
    assert message.endswith("(details in TMP/out/train.log)")
    assert "AssertionError" in (tmp_path / "out" / "train.log").read_text()


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--training.seq_len", "0"], "--training.seq_len must be at least 1, got 0"),
        (["--training.steps", "0"], "--training.steps must be at least 1, got 0"),
        (["--training.local_batch_size", "0"], "--training.local_batch_size must be at least 1, got 0"),
        (["--metrics.log_freq", "0"], "--metrics.log_freq must be at least 1, got 0"),
        (["--validator.freq", "0"], "--validator.freq must be at least 1, got 0"),
        (["--validator.steps", "0"], "validation steps must be positive or -1"),
        (["--dump_folder", "x"], "--dump_folder must be left out, got x; --output is the folder of a run"),
        (
            ["--checkpoint.no-enable"],
            "--checkpoint.enable must be true: a run ends with a checkpoint and its held-out figure",
        ),
        (
            ["--validator.no-enable"],
            "--validator.enable must be true: a run ends with a checkpoint and its held-out figure",
        ),
    ],
)
def test_option_that_cannot_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], expected: str
) -> None:
    assert refused(capsys, tmp_path, *argv) == f"openkda train: {expected}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("below, why", [("file", "File exists"), ("file/out", "Not a directory")])
def test_output_that_cannot_be_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, below: str, why: str
) -> None:
    (tmp_path / "file").touch()
    message = refused(capsys, tmp_path, "--output", tmp_path / below)
    assert message == f"openkda train: --output TMP/{below}: cannot be written to: {why}"


@pytest.mark.parametrize("damage", ["metadata", "weights"])
def test_damaged_checkpoint_is_one_line(
    run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    shutil.copytree(run[0], tmp_path / "run")
    step = tmp_path / "run" / "checkpoint" / "step-4"
    file = step / (".metadata" if damage == "metadata" else "__0_0.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    for argv, expected in (
        (
            ["train", "--resume", step, "--steps", "5"],
            f"a checkpoint in {tmp_path / 'run'} cannot be read or written: ",
        ),
        (["generate", "--checkpoint", step, "--prompt", "a"], f"{step}: does not fit its configuration: "),
        (["convert", "--from", "dcp", step, "--to", "hf", tmp_path / "hf"], f"{step}: cannot be read: "),
    ):
        assert main([str(a) for a in argv]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"openkda {argv[0]}: {expected}")
        assert err.count("\n") == 1


@pytest.mark.parametrize("temperature", ["1e-40", "1e-320"])
def test_tiny_temperature_takes_the_likeliest_token(
    run: tuple[Path, str], capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    texts = []
    for t in ("0", temperature):
        argv = ["--checkpoint", str(run[0]), "--prompt", "The", "--max-new-tokens", "8", "--temperature", t]
        assert main(["generate", *argv]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "TMP/text.txt: holds no text"),
        (b"abc \xff", "TMP/text.txt: is not UTF-8 text: byte 0xff at offset 4"),
        (
            b"word " * 100,
            "TMP/text.txt: 476 tokens to train on are fewer than one sequence of 1024; "
            "give more text, or a smaller --training.seq_len",
        ),
        (b"a", "TMP/text.txt: is too short to hold text out"),
    ],
    ids=["empty", "undecodable", "short", "one byte"],
)
def test_text_that_cannot_be_trained_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    message = refused(capsys, tmp_path, "--data", tmp_path / "text.txt", "--training.seq_len", "1024")
    assert message == f"openkda train: {expected}"


def test_json_line_without_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"body": "b"}))
    assert refused(capsys, tmp_path, "--data", tmp_path / "a.jsonl") == (
        'openkda train: TMP/a.jsonl: line 2 has no "text" string; each line must be an object like {"text": "..."}'
    )


def test_bad_tokenizer_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = refused(capsys, tmp_path, "--tokenizer", tmp_path / "none.json")
    assert message == "openkda train: TMP/none.json: no such tokenizer file"


def test_refused_request_leaves_no_state_behind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = (dict(os.environ), signal.getsignal(signal.SIGINT))
    refused(capsys, tmp_path, "--training.global_batch_size", "3")
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before
    assert not torch.distributed.is_initialized()


def test_help_all_lists_torchtitans_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "--config", "kimi_linear_tiny", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert "--training.seq-len" in out
    assert not (tmp_path / "out").exists()
