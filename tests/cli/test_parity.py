"""`openkda parity` as a command: its lines, its files, its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan", reason="needs the torchtitan extra")
pytest.importorskip("transformers", reason="needs the transformers extra")

from openkda.cli.main import main  # noqa: E402

# torch 2.13 and torchtitan warn of each other; none of it is ours to change.
pytestmark = pytest.mark.filterwarnings("ignore")

LINE = re.compile(r"KL=(\S+) cos=(\S+) max_diff=(\S+) top1=([YN]) top5=(\S+)%")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text(
        "The first prompt,\non two lines.\n\n\nThe second prompt is here, and a little longer than the first.\n"
    )
    return path


def parity(*argv: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["parity", *map(str, argv)])
    return code, out.getvalue(), err.getvalue()


def test_command_ends_with_the_figures_of_last_and_of_all_tokens(prompts: Path, tmp_path: Path) -> None:
    report, data = tmp_path / "out.html", tmp_path / "out.json"
    limits = ["--max-kl", "1e-9", "--min-cos", "0.9999999", "--min-top1", "100", "--max-grad-error", "1e-4"]
    options = ["--prompts", prompts, "--grad", "--packed", "--report", report, "--json", data]
    code, out, err = parity("--hf", "tiny", *options, *limits, "--max-packed-error", "1e-5")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-2].startswith("last token: KL=")
    assert lines[-1].startswith("all tokens: KL=")
    for line in lines[-2:]:
        kl, cos, max_diff, top1, top5 = LINE.search(line).groups()  # type: ignore[union-attr]
        assert float(kl) <= 1e-9
        assert float(cos) >= 0.9999999
        assert float(max_diff) < 1e-3
        assert (top1, float(top5)) == ("Y", 100.0)
    assert "mean_KL=" in lines[-1]
    assert "first divergence: none" in lines
    figures = json.loads(data.read_text())
    assert f"KL={figures['all']['kl']:.4e} " in lines[-1]
    assert figures["prompts"] == 2
    assert figures["packed"]["logits_error"] <= 1e-5
    assert report.read_text().startswith("<!doctype html>")


def test_exit_code_is_1_over_a_threshold_and_says_which(prompts: Path) -> None:
    code, out, err = parity("--hf", "tiny-bounded", "--prompts", prompts, "--max-kl", "1e-30", "--min-top5", "100")
    assert (code, err) == (1, "")
    assert re.search(r"^over the threshold: kl must be at most 1e-30, got \d", out, re.MULTILINE)
    assert out.count("over the threshold") == 1
    assert out.splitlines()[-1].startswith("all tokens: KL=")


def test_limit_that_needs_another_option_is_not_passed_over(prompts: Path) -> None:
    code, out, _ = parity("--hf", "tiny", "--prompts", prompts, "--max-grad-error", "1")
    assert code == 1
    assert "max_grad_error 1 was asked for, and was not measured" in out


def test_config_alone_gives_random_weights(prompts: Path, tmp_path: Path) -> None:
    from openkda.parity.reference import tiny_config

    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    code, out, _ = parity("--hf", tmp_path / "config.json", "--prompts", prompts, "--seed", "3", "--max-kl", "1e-9")
    assert code == 0
    assert "Random weights (seed 3); lm_head times" in out


def test_folder_with_weights_is_compared_as_it_is(prompts: Path, tmp_path: Path) -> None:
    from openkda.parity.reference import tiny_config, write_random

    write_random(tiny_config(-5.0), tmp_path, seed=0)
    code, out, _ = parity("--hf", tmp_path, "--prompts", prompts, "--max-kl", "1e-9")
    assert code == 0
    assert "Random weights" not in out


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "the following arguments are required: --hf; see openkda parity --help"),
        (["--hf", "/no/such"], "/no/such: no such file or folder; or give one of tiny, tiny-bounded"),
        (["--hf", "tiny", "--prompts", "/no/such"], "/no/such: no such file"),
        (["--hf", "tiny", "--report", "/no/such/out.html"], "/no/such/out.html: its folder does not exist"),
        (
            ["--hf", "tiny", "--max-kl", "small"],
            "argument --max-kl: invalid float value: 'small'; see openkda parity --help",
        ),
    ],
)
def test_wrong_request_is_one_line(argv: list[str], message: str) -> None:
    assert parity(*argv) == (2, "", f"openkda parity: {message}\n")


def test_config_of_another_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, _, err = parity("--hf", tmp_path)
    assert code == 2
    assert "model_type must be 'kimi_linear' or 'kimi_linear_bounded', got 'llama'" in err


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("openkda.parity.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = parity("--hf", "tiny")
    assert (code, out) == (2, "")
    assert err.endswith("install the extra: pip install 'openkda[transformers]'\n")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_full_comparison_takes_less_than_three_minutes_without_a_network(tmp_path: Path) -> None:
    import time

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    for extra in (["--grad", "--packed"], ["--dtype", "bf16", "--routing", "forced"]):
        argv = [sys.executable, "-m", "openkda.cli", "parity", "--hf", "tiny", *extra, "--report", "out.html"]
        subprocess.run(argv, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert time.monotonic() - start < 180
