"""The command line itself: its options, what it costs to ask for help, and one line for every wrong request."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from openkda.cli import bigram, progress
from openkda.cli.main import build_parser, main
from openkda.cli.record import RunRecord

# Adding, renaming or removing an option changes what users type: it is a decision, made here.
OPTIONS = {
    "train": [
        "--config NAME",
        "--data PATH",
        "--tokenizer FILE",
        "--steps N",
        "--output DIR",
        "--resume PATH",
        "--nproc N",
        "--module MODULE",
        "--verbose",
        "--help-all",
    ],
    "generate": [
        "--checkpoint PATH",
        "--prompt TEXT",
        "--max-new-tokens N",
        "--temperature T",
        "--top-k K",
        "--batch-invariant",
        "--seed N",
    ],
    "convert": ["--from FORMAT DIR", "--to FORMAT DIR"],
    "parity": [
        "--hf DIR_OR_CONFIG",
        "--prompts FILE",
        "--routing",
        "--dtype",
        "--rounding",
        "--grad",
        "--packed",
        "--seed N",
        "--report FILE",
        "--json FILE",
        "--max-kl X",
        "--max-mean-kl X",
        "--max-last-kl X",
        "--min-cos X",
        "--max-diff X",
        "--min-top1 X",
        "--min-top5 X",
        "--max-grad-error X",
        "--max-packed-error X",
    ],
    "bench": [
        "what",
        "--peers LIST",
        "--shape BxTxH",
        "--gate",
        "--gates-drawn",
        "--head-dim K",
        "--hidden D",
        "--dtype",
        "--backend",
        "--device",
        "--repeats N",
        "--timeout SECONDS",
        "--kernels",
        "--plot FILE",
        "--json FILE",
        "--markdown FILE",
    ],
    "doctor": [],
}


def subparsers() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    return next(a.choices for a in actions if isinstance(a, argparse._SubParsersAction))


def test_options_are_pinned() -> None:
    def shown(action: argparse.Action) -> str:
        values = [action.metavar] if isinstance(action.metavar, str) else list(action.metavar or ())
        return " ".join([*(action.option_strings[-1:] or [action.dest]), *values])

    found = {
        name: [shown(action) for action in parser._actions if action.dest != "help"]
        for name, parser in subparsers().items()
    }
    assert found == OPTIONS


def test_every_option_is_explained() -> None:
    for parser in subparsers().values():
        assert all(action.help for action in parser._actions)


def test_help_imports_no_tensor_library_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys\nfrom openkda.cli.main import main\n"
        "helps = [[command, '--help'] for command in ('train', 'parity', 'bench')]\n"
        "codes = [main(a) for a in (['--help'], *helps, ['--version'], [])]\n"
        "heavy = {'torch', 'paddle', 'triton', 'numpy', 'torchtitan', 'transformers', 'rich'} & set(sys.modules)\n"
        "print('RESULT', codes, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "RESULT [0, 0, 0, 0, 0, 0] []"
    assert "openkda train --config kimi_linear_tiny" in done.stdout
    assert done.stderr == ""


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a request that must be refused; return the one line it is refused with."""
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.rstrip("\n")


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["dance"], "openkda: argument COMMAND: invalid choice: 'dance' (choose from"),
        (["--dance"], "openkda: the following arguments are required: COMMAND; see openkda --help"),
        (["doctor", "--deep"], "openkda doctor: unknown option --deep; see openkda doctor --help"),
        (["train"], "openkda train: --config is required, such as --config kimi_linear_tiny"),
        (
            ["train", "--config", "x", "--steps", "0"],
            "openkda train: argument --steps: must be a whole number above 0, got 0; see openkda train --help",
        ),
        (
            ["train", "--config", "x", "--steps", "many"],
            "openkda train: argument --steps: must be a whole number above 0, got many; see openkda train --help",
        ),
        (["train", "--config"], "openkda train: argument --config: expected one argument; see openkda train --help"),
        (["train", "--config", "x", "--data", "/no/such"], "openkda train: /no/such: no such file or folder"),
        (["train", "--resume", "/no/such"], "openkda train: /no/such: no such file or folder"),
        (
            ["generate", "--prompt", "a"],
            "openkda generate: the following arguments are required: --checkpoint; see openkda generate --help",
        ),
        (
            ["generate", "--prompt", "a", "--checkpoint", "/no/such"],
            "openkda generate: /no/such: no such file or folder",
        ),
        (
            ["generate", "--prompt", "a", "--checkpoint", "/", "--temperature", "-1"],
            "openkda generate: --temperature must be 0 or more, got -1.0",
        ),
        (
            ["generate", "--prompt", "a", "--checkpoint", "/", "--top-k", "0"],
            "openkda generate: --top-k must be at least 1, got 0",
        ),
        (
            ["generate", "--prompt", "a", "--checkpoint", "/", "--max-new-tokens", "0"],
            "openkda generate: --max-new-tokens must be at least 1, got 0",
        ),
        (
            ["generate", "--prompt", "a", "--checkpoint", "/", "--max-new-tokens", "9999999"],
            "openkda generate: --max-new-tokens must be at most 1048576, got 9999999",
        ),
        (
            ["generate", "--prompt", "a", "--checkpoint", "/", "--seed", str(1 << 64)],
            f"openkda generate: --seed must be from 0 to 2**64 - 1, got {1 << 64}",
        ),
        (["generate", "--prompt", "\udcff", "--checkpoint", "/"], "openkda generate: --prompt must be UTF-8 text"),
    ],
)
def test_wrong_request_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert refused(capsys, *argv).startswith(expected)


# Runs on disk.


def run_folder(path: Path, *steps: int, complete: bool = True) -> Path:
    RunRecord(config="c", module="m").save(path / "checkpoint", None)
    for step in steps:
        folder = path / "checkpoint" / f"step-{step}"
        folder.mkdir()
        if complete:
            (folder / ".metadata").touch()
    return path


def test_folder_without_a_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    expected = "holds no openkda.json; give the output folder of a run, or one of its step-N folders"
    assert refused(capsys, "train", "--resume", tmp_path) == f"openkda train: {tmp_path}: {expected}"


def test_run_without_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_folder(tmp_path)
    assert refused(capsys, "train", "--resume", tmp_path) == (
        f"openkda train: {tmp_path / 'checkpoint'}: holds no checkpoint yet"
    )


def test_checkpoint_that_was_not_finished(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_folder(tmp_path, 5, complete=False)
    step = tmp_path / "checkpoint" / "step-5"
    assert refused(capsys, "train", "--resume", step) == f"openkda train: {step}: is not a complete checkpoint"


def test_damaged_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_folder(tmp_path, 1)
    record = tmp_path / "checkpoint" / "openkda.json"
    record.write_text("{")
    assert refused(capsys, "train", "--resume", tmp_path).startswith(
        f"openkda train: {record}: is not a record of openkda train: "
    )


def test_output_that_holds_a_run_is_not_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_folder(tmp_path, 3, 12)
    assert refused(capsys, "train", "--config", "c", "--output", tmp_path) == (
        f"openkda train: --output {tmp_path} already holds a checkpoint of step 12; "
        f"go on with --resume {tmp_path}, or give another folder"
    )


def test_resume_keeps_its_folder_and_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 1)
    assert refused(capsys, "train", "--resume", run, "--output", tmp_path / "other") == (
        f"openkda train: --output must be left out with --resume, which goes on in {run}, got {tmp_path / 'other'}"
    )
    assert refused(capsys, "train", "--resume", run, "--config", "d") == (
        f"openkda train: --config must be c to resume {run}, got d"
    )


def test_output_is_required_with_several_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(capsys, "train", "--config", "c") == (
        "openkda train: --output is required with several processes, so that all of them use the same folder"
    )


# Small parts.


def test_bigram_figure_by_hand() -> None:
    # Of the 257 outcomes after "a", K = 0.1 each: "b" was seen twice, the end once, so P(b | a) = 2.1 / 28.7.
    # After the begin: "a" three times. After "b": the end twice. One byte is held out, "a", and then the end.
    import math

    expected = -math.log2(3.1 / 28.7) - math.log2(1.1 / 28.7)
    assert bigram.bits_per_byte(["ab", "ab", "a"], ["a"]) == pytest.approx(expected, abs=1e-9)


def test_bigram_beats_chance_on_english() -> None:
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    assert 3.0 < bigram.bits_per_byte(texts[5:], texts[:5]) < 4.5


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3600, "1:00:00"), (-3, "0:00")]
)
def test_duration(seconds: float, text: str) -> None:
    assert progress.format_duration(seconds) == text


def test_progress_without_a_terminal_prints_the_first_and_the_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    line = progress.Progress(3)
    line.start()
    for step in (1, 2, 3):
        line.update(step, loss=4 - step, bits=1.5, tokens_per_s=1234.5, eta_s=61)
    line.stop()
    assert capsys.readouterr().out.splitlines() == [
        "step 1/3  loss 3.0000  1.500 bits/byte  1,234 tokens/s  ETA 1:01",
        "step 3/3  loss 1.0000  1.500 bits/byte  1,234 tokens/s  ETA 1:01",
    ]


def test_progress_of_other_ranks_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    line = progress.Progress(1, quiet=True)
    line.start()
    line.update(1, loss=1, bits=1, tokens_per_s=1, eta_s=1)
    line.say("hello")
    line.stop()
    assert capsys.readouterr().out == ""


def run_without_a_reader(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code whose standard output nobody reads."""
    import os

    ours, theirs = os.pipe()
    os.close(ours)
    try:
        return subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(theirs)


def test_reader_that_leaves_ends_a_command_without_a_traceback() -> None:
    done = run_without_a_reader("import sys; from openkda.cli.main import main; sys.exit(main(['doctor']))")
    assert (done.returncode, done.stderr) == (141, "")


def test_reader_that_leaves_does_not_end_a_training() -> None:
    done = run_without_a_reader(
        "import sys; from openkda.cli.progress import Progress\n"
        "p = Progress(2); p.start(); p.say('a'); p.say('b'); p.stop(); print('still here', file=sys.stderr)"
    )
    assert (done.returncode, done.stderr) == (0, "still here\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_progress_on_a_terminal_rewrites_its_line() -> None:
    pytest.importorskip("rich")
    import os
    import pty

    code = (
        "from openkda.cli.progress import Progress\n"
        "p = Progress(2); p.start()\n"
        "[p.update(s, loss=1, bits=2, tokens_per_s=3, eta_s=4) for s in (1, 2)]\n"
        "p.say('a line above'); p.stop()"
    )
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # Linux: the other end is closed
        pass
    assert done.wait() == 0
    os.close(ours)
    assert b"a line above" in shown
    assert b"step 2/2" in shown
    assert b"\r\x1b[2K" in shown  # back to the start of the line, and clear it


def test_doctor_names_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in out
    assert "cpu:" in out
    assert "chunk_kda" in out


def test_doctor_says_how_to_get_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from openkda.cli import doctor

    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torchtitan    missing, wanted for openkda train and generate: pip install 'openkda[torchtitan]'" in out
    assert "devices" not in out  # torch is missing too


def test_missing_torchtitan_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import PackageNotFoundError

    from openkda.integrations import torchtitan

    def not_found(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(torchtitan, "version", not_found)
    assert refused(capsys, "train", "--config", "kimi_linear_tiny") == (
        "openkda train: openkda.integrations.torchtitan: torchtitan must be 0.3.0, got no torchtitan; "
        "install the extra: pip install 'openkda[torchtitan]'"
    )
