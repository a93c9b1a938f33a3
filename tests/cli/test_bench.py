"""`openkda bench` for real, on a CPU and tiny shapes: its files, its lines, what a missing or broken peer does."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich", reason="needs the bench extra")
pytest.importorskip("matplotlib", reason="needs the bench extra")

import openkda  # noqa: E402
from openkda.bench import layer, measure, op, peers, plot, report, row  # noqa: E402
from openkda.cli.main import main  # noqa: E402

TINY = ["--head-dim", "16", "--repeats", "2", "--device", "cpu"]
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


def bench(*argv: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["bench", *map(str, argv)])
    return code, out.getvalue(), err.getvalue()


def tiny_case(**changes: object) -> dict[str, object]:
    return {"B": 1, "T": 64, "H": 2, "K": 16, "dtype": "float32", "device": "cpu"} | changes


def measured_row(peer: str | None, **results: dict[str, object]) -> dict[str, object]:
    return {"shape": "1x64x2", "peer": peer, "case": tiny_case(), "implementations": results, "failure": None}


@pytest.fixture
def fake_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a module `fla` with the given source on the path of this process and of its rows."""

    def write(source: str) -> None:
        package = tmp_path / "peer" / "fla" / "ops"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "kda.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path / "peer")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "peer"), os.environ.get("PYTHONPATH", "")]))

    return write


# ---- what a run writes
def test_op_writes_table_json_plot_and_page(tmp_path: Path):
    data, picture, page = (tmp_path / name for name in ("out.json", "out.png", "out.md"))
    files = ["--json", data, "--plot", picture, "--markdown", page]
    code, out, err = bench("op", "--peers", "none", "--shape", "1x64x2", "2x128x1", *TINY, *files)
    assert code == 0, out + err
    found = json.loads(data.read_text())
    assert found["benchmark"] == "op"
    assert found["command"].startswith("openkda bench op --peers none --shape 1x64x2 2x128x1")
    assert [r["shape"] for r in found["rows"]] == ["1x64x2", "2x128x1"]
    for one in found["rows"]:
        assert one["stage"] == "done"
        assert one["failure"] is None
        ours = one["implementations"]["openkda"]
        assert ours["reason"] is None
        for kind in ("forward_ms", "forward_backward_ms"):
            assert 0 < ours[kind]["p20"] <= ours[kind]["p50"] <= ours[kind]["p80"]
        # bf16 inputs: the eager operator keeps the budget that the row states beside its errors
        assert set(ours["errors"]) == {"o", *(f"d{name}" for name in INPUTS)} == set(one["allowed"])
        assert all(0 < ours["errors"][name] < 0.05 for name in ours["errors"])
        assert one["machine"]["torch"] == torch.__version__
        assert ours["versions"] == {"openkda": openkda.__version__}
    assert picture.read_bytes().startswith(b"\x89PNG")
    for text in (out, page.read_text()):
        assert "openkda bench op on" in text
        assert "2x128x1" in text
        assert "bf16, K = V = 16, bounded gate drawn as benchmark, openkda backend auto, 2 repeats" in text
    assert found["command"] in page.read_text()
    assert json.loads(out.splitlines()[-1]) == {"benchmark": "op", "rows": 2, "times_openkda": {}}


def test_layer_tells_the_projections_from_the_rest(tmp_path: Path):
    data = tmp_path / "out.json"
    code, out, err = bench("layer", "--peers", "none", "--shape", "1x64x2", "--hidden", "32", *TINY, "--json", data)
    assert code == 0, out + err
    (one,) = json.loads(data.read_text())["rows"]
    ours = one["implementations"]["openkda"]
    whole, alone = ours["forward_backward_ms"]["p50"], ours["projections_ms"]["p50"]
    assert 0 < alone < whole
    assert ours["outside_projections_ms"] == pytest.approx(whole - alone, abs=1e-3)
    assert 0 < ours["errors"]["y"] < 0.05
    assert "outside them ms" in out


# ---- peers
@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["op", "--peers", "fla,mamba"],
            "--peers: bench op knows fla, attn_gym, cudnn, cudnn_core, flash_kda and none, got 'mamba'",
        ),
        (["layer", "--peers", "cudnn"], "--peers: bench layer knows fla and none, got 'cudnn'"),
        (["op", "--shape", "8192x32"], "--shape: must be BxTxH, as in 1x8192x32, got '8192x32'"),
        (["op", "--repeats", "1"], "--repeats: must be at least 2, got 1"),
        (["op", "--json", "/no/such/out.json"], "/no/such/out.json: its folder does not exist"),
        (
            ["dance"],
            "argument what: invalid choice: 'dance' (choose from op, layer); see openkda bench --help",
        ),
    ],
)
def test_wrong_request_is_one_line_and_exit_code_2(argv: list[str], message: str):
    code, out, err = bench(*argv)
    assert (code, out) == (2, "")
    assert err.replace("'op', 'layer'", "op, layer") == f"openkda bench: {message}\n"


def test_unknown_plot_format_is_one_line(tmp_path: Path):
    path = tmp_path / "out.doc"
    code, _, err = bench("op", "--peers", "none", "--shape", "1x64x1", *TINY, "--plot", path)
    assert code == 2
    assert f"openkda bench: {path}: Format 'doc' is not supported" in err


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="fla is installed")
def test_peer_that_is_not_installed_has_one_line():
    code, out, _ = bench("op", "--peers", "fla", "--shape", "1x64x1", *TINY)
    assert code == 0
    assert "fla: not measured, as it is not installed (pip install fla-core)" in out.splitlines()


def test_peer_that_cannot_be_imported_gives_its_reason_and_ours_is_measured(fake_peer, tmp_path: Path):
    fake_peer("raise ImportError('libfancy.so.7: cannot open shared object file')")
    data = tmp_path / "out.json"
    code, out, _ = bench("op", "--peers", "fla", "--shape", "1x64x1", *TINY, "--json", data)
    assert code == 0
    assert "fla at 1x64x1: cannot be used here: libfancy.so.7: cannot open shared object file" in out.splitlines()
    (one,) = json.loads(data.read_text())["rows"]
    assert one["implementations"]["openkda"]["forward_backward_ms"]["p50"] > 0


def test_peer_that_ends_the_process_ends_its_row_only(fake_peer):
    fake_peer("import os\ndef chunk_kda(*args, **kwargs):\n    print('lost', flush=True)\n    os._exit(7)\n")
    code, out, _ = bench("op", "--peers", "fla", "--shape", "1x64x1", *TINY)
    assert code == 1, out
    assert "fla at 1x64x1: exit code 7: lost, in stage: first call of fla" in out.splitlines()


def test_peer_with_the_same_results_is_measured_in_turns(fake_peer, tmp_path: Path):
    fake_peer(
        "import openkda\n"
        "def chunk_kda(safe_gate, dt_bias, **kwargs):\n"
        "    assert safe_gate and dt_bias.dim() == 1\n"
        "    return openkda.chunk_kda(dt_bias=dt_bias, backend='reference', **kwargs)\n"
    )
    data = tmp_path / "out.json"
    code, out, err = bench("op", "--peers", "fla", "--shape", "1x64x2", *TINY, "--dtype", "fp32", "--json", data)
    assert code == 0, out + err
    (one,) = json.loads(data.read_text())["rows"]
    both = one["implementations"]
    for name in both["openkda"]["errors"]:
        assert both["openkda"]["errors"][name] <= 5e-6
        assert both["fla"]["errors"][name] <= 5e-6
    ratio = json.loads(out.splitlines()[-1])["times_openkda"]["1x64x2"]["fla"]
    expected = both["fla"]["forward_backward_ms"]["p50"] / both["openkda"]["forward_backward_ms"]["p50"]
    assert ratio == pytest.approx(expected, abs=1e-3)


def test_row_over_its_time_is_stopped_with_all_its_processes_and_keeps_what_it_had(fake_peer, tmp_path: Path):
    mark = tmp_path / "pid"
    fake_peer(
        "import subprocess, time\n"
        "def chunk_kda(*args, **kwargs):\n"
        "    child = subprocess.Popen(['sleep', '100'])\n"
        f"    open({str(mark)!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(100)\n"
    )
    spec = {"what": "op", "shape": "1x64x2", "peer": "fla", "case": tiny_case(), "repeats": 2, "kernels": False}
    spec["imports"] = "fla.ops.kda"
    (found,) = row.measure_all([spec], [{"OMP_NUM_THREADS": "1"}], 15, ahead=True)
    assert found["failure"] == "stopped after 15 s, in stage: first call of fla"
    assert found["implementations"]["openkda"]["first_call_s"] > 0
    for _ in range(50):  # the child's end is reported by the system, not by us
        if not Path(f"/proc/{mark.read_text()}").exists():
            break
        time.sleep(0.1)
    else:
        os.kill(int(mark.read_text()), signal.SIGKILL)
        pytest.fail("a process of the row is still running")


def test_rows_that_start_ahead_come_in_order():
    shapes = ("1x64x1", "1x128x1")
    specs = [{"what": "op", "shape": shape, "peer": None, "repeats": 2, "kernels": False} for shape in shapes]
    for spec, T in zip(specs, (64, 128), strict=True):
        spec["case"] = tiny_case(T=T, H=1)
    found = list(row.measure_all(specs, [{"OMP_NUM_THREADS": "1"}] * 2, 60, ahead=True))
    assert [(r["shape"], r["stage"], r["failure"]) for r in found] == [(shape, "done", None) for shape in shapes]


def test_command_that_is_ended_shows_what_it_has_and_leaves_no_process(fake_peer, tmp_path: Path):
    mark = tmp_path / "pid"
    fake_peer(
        "import os, time, openkda\n"
        "def chunk_kda(safe_gate, **kwargs):\n"
        "    if kwargs['q'].shape[1] == 128:\n"
        f"        open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(100)\n"
        "    return openkda.chunk_kda(**kwargs)\n"
    )
    argv = ["bench", "op", "--peers", "fla", "--shape", "1x64x1", "1x128x1", *TINY]
    command = [sys.executable, "-m", "openkda.cli", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    start = time.monotonic()
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() - start < 60
        time.sleep(0.1)
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "openkda bench: interrupted"
    assert re.search("^│ 1x64x1 +│ openkda", out, re.MULTILINE)
    assert "fla at 1x128x1: interrupted, in stage: first call of fla" in out
    assert not Path(f"/proc/{mark.read_text()}").exists()


@pytest.mark.parametrize("cls", [*peers.PEERS.values()], ids=str)
def test_adapters_say_what_a_reader_needs(cls: type[peers.Implementation]):
    assert cls.install
    assert cls.note
    assert cls.distributions


def test_versions_of_unknown_distributions_do_not_stop_a_row():
    class Nowhere(peers.Fla):
        distributions = ("no-such-distribution",)

    assert Nowhere.versions()["no-such-distribution"] == "unknown"


# ---- inputs, adapters
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("drawn", ["benchmark", "fla_init"])
def test_activations_before_a_peer_are_those_of_the_operator(gate: str, drawn: str):
    from openkda import chunk_kda

    case = peers.Case(**tiny_case(gate=gate, gates_drawn=drawn))
    x = op.draw(case)
    q, k, g, beta = peers.activate(case.lower_bound, *(x[n] for n in ("q", "k", "g", "beta", "A_log", "dt_bias")))
    assert (g <= 0).all()
    got, _ = chunk_kda(q, k, x["v"], g, beta)
    torch.testing.assert_close(got, peers.OpenKDA(case).forward(x), rtol=1e-5, atol=1e-6)


def test_fla_init_gates_are_those_of_a_new_layer():
    from openkda.nn import KimiDeltaAttention

    case = peers.Case(**tiny_case(H=8, K=64, gate="softplus", gates_drawn="fla_init"))
    x, new = op.draw(case), KimiDeltaAttention(32, 8, 64)
    for name in ("A_log", "dt_bias"):
        drawn, own = x[name].flatten(), getattr(new, name).detach()
        assert drawn.mean().item() == pytest.approx(own.mean().item(), abs=4 * own.std().item() / len(own) ** 0.5)
    assert x["g"].std().item() == pytest.approx(1 / 3, rel=0.05)


def test_weights_of_our_layer_reach_fla_s_by_name():
    """fla's module tree, as far as names go; with the same weights the two compute the same, which a GPU run shows."""
    ours = layer.openkda_layer(layer.Case(1, 64, 2, 16, hidden=32, dtype="float32", device="cpu"))
    theirs = torch.nn.Module()
    for name, child in ours.named_children():
        if name not in layer.FLA_NAMES:
            theirs.add_module(name, torch.nn.Module())
            theirs.get_submodule(name).weight = torch.nn.Parameter(torch.zeros(child.weight.numel()))
    for first, second, bias in (("f_a_proj", "f_b_proj", False), ("g_a_proj", "g_b_proj", True)):
        pair = [torch.nn.Linear(*reversed(getattr(ours, first).weight.shape), bias=False)]
        pair += [torch.nn.Linear(*reversed(getattr(ours, second).weight.shape), bias=bias)]
        theirs.add_module(layer.FLA_NAMES[first].split(".")[0], torch.nn.Sequential(*pair))
    theirs.A_log, theirs.dt_bias = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(32))
    layer.with_weights_of(ours, theirs)
    assert torch.equal(theirs.f_proj[1].weight, ours.f_b_proj.weight)
    assert torch.equal(theirs.g_proj[0].weight, ours.g_a_proj.weight)
    assert not theirs.g_proj[1].bias.any()
    assert torch.equal(theirs.q_conv1d.weight.view_as(ours.q_conv1d.weight), ours.q_conv1d.weight)
    assert torch.equal(theirs.dt_bias, ours.dt_bias)


def test_gate_parameters_of_fla_s_layer_stay_wide(monkeypatch: pytest.MonkeyPatch):
    class Theirs(torch.nn.Module):  # what the adapter touches of fla's layer
        def __init__(self, **sizes: object):
            super().__init__()
            self.sizes = sizes
            self.A_log, self.dt_bias, self.weight = (torch.nn.Parameter(torch.full((2,), 1 / 3)) for _ in range(3))

    modules = {name: types.ModuleType(name) for name in ("fla", "fla.layers", "fla.layers.kda")}
    modules["fla.layers.kda"].KimiDeltaAttention = Theirs
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    made = layer.fla_layer(layer.Case(1, 64, 2, 16, hidden=32, gate="bounded", device="cpu"))
    assert made.sizes == {"hidden_size": 32, "head_dim": 16, "num_heads": 2, "safe_gate": True, "lower_bound": -5.0}
    assert made.weight.dtype == torch.bfloat16
    assert torch.equal(made.A_log, torch.full((2,), 1 / 3))
    assert made.dt_bias.dtype == torch.float32


def test_linear_maps_of_the_layer_are_all_counted_as_projections():
    ours = layer.openkda_layer(layer.Case(1, 64, 2, 16, hidden=48, dtype="float32", device="cpu"))
    found = layer.Projections(ours, torch.randn(1, 64, 48))
    linear = {name for name, child in ours.named_modules() if isinstance(child, torch.nn.Linear)}
    assert set(found.maps) == linear
    assert len(found()) == 9


# ---- time, table, picture
def test_calls_take_turns_in_both_orders():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    found = measure.alternate(calls, 4, torch.device("cpu"))
    assert order[2 * measure.WARM_UP :] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(ms) for name, ms in found.items()} == {"a": 4, "b": 4}


def test_error_that_is_not_finite_stays_valid_json_and_is_said():
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    assert op.error(nan, one) is None
    assert op.error(one + 1e-3, one) == pytest.approx(1e-3, rel=1e-3)
    result = {"forward_ms": {"p20": 1.0, "p50": 1.0, "p80": 1.0}, "errors": {"o": None, "dq": 0.1, "dg": None}}
    assert report.value(result, {}, "o_error") == "not finite"
    assert report.value(result, {}, "worst_gradient") == "not finite dg"


def test_table_shows_openkda_once_per_shape_and_each_peer_against_its_own_row():
    def times(both: float) -> dict[str, object]:
        spread = {"p20": both, "p50": both, "p80": both}
        return {"reason": None, "forward_ms": spread, "forward_backward_ms": spread}

    rows = [
        measured_row("fla", openkda=times(2.0), fla=times(5.0)),
        measured_row("cudnn", openkda=times(3.0), cudnn=times(6.0)),
    ]
    found = [(name, cells["ratio"]) for _, name, cells, _ in report.lines("op", rows)]
    assert found == [("openkda", "-"), ("fla", "2.500"), ("cudnn", "2.000")]
    assert plot.series(rows, "forward_ms")["openkda, B1 H2"] == [(64, 2.0)]


def test_command_knows_the_adapters_and_what_they_import():
    from openkda.cli import bench as command

    assert set(command.PEERS["op"]) == set(peers.PEERS) == set(command.IMPORTS)
    assert set(command.PEERS["layer"]) == set(layer.LAYERS)
    assert all(command.IMPORTS[name].split(".")[0] == cls.module for name, cls in peers.PEERS.items())
