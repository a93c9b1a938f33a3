"""Checkpoints of transformers to torch.distributed.checkpoint and back, bit for bit, tensor by tensor."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from openkda.integrations.torchtitan import hf_checkpoint
from openkda.integrations.torchtitan.hf_checkpoint import (
    INDEX,
    HFWeights,
    SafetensorsFolder,
    dcp_to_hf,
    hf_to_dcp,
    load_config,
)

transformers = pytest.importorskip("transformers", reason="needs the transformers extra")


def write_checkpoint(folder: Path, shard: str = "100KB", dtype: torch.dtype = torch.bfloat16) -> None:
    """A tiny model as transformers saves it: several files, weights in bf16, what it keeps in fp32 in fp32."""
    from openkda.parity.reference import quiet, tiny_config

    config = transformers.KimiLinearConfig(**{k: v for k, v in tiny_config().items() if k != "model_type"})
    model = transformers.KimiLinearForCausalLM(config)
    for name, parameter in model.named_parameters():
        if not name.endswith(("dt_bias", "A_log", "mlp.gate.weight")):
            parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_checkpoint(folder)
    return folder


@pytest.fixture
def changed(source: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], None]], Path]:
    """A copy of the checkpoint, in one file, with its tensors changed."""

    def make(change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(source, folder)
        tensors = tensors_of(folder)
        for path in [*folder.glob("*.safetensors"), folder / INDEX]:
            path.unlink()
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def published(name: str) -> str:
    return name.replace("layers.0.block_sparse_moe.", "layers.0.mlp.")


def assert_equal_bytes(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert {published(name) for name in want} == set(got)
    for name, value in want.items():
        other = got[published(name)]
        assert (other.dtype, other.shape) == (value.dtype, value.shape), name
        assert torch.equal(other.view(torch.uint8), value.view(torch.uint8)), name


def test_round_trip_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    want = tensors_of(source)
    assert len(list(source.glob("*.safetensors"))) > 3
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in want
    assert {value.dtype for value in want.values()} == {torch.bfloat16, torch.float32}
    hf_to_dcp(source, tmp_path / "dcp")
    dcp_to_hf(tmp_path / "dcp", tmp_path / "hf", shard_bytes=100_000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    assert_equal_bytes(tensors_of(tmp_path / "hf"), want)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()


def test_transformers_loads_what_comes_back(source: Path, tmp_path: Path) -> None:
    from openkda.parity.reference import quiet

    hf_to_dcp(source, tmp_path / "dcp")
    dcp_to_hf(tmp_path / "dcp", tmp_path / "hf", shard_bytes=100_000)
    models = []
    for folder in (source, tmp_path / "hf"):
        with quiet():
            model, said = transformers.KimiLinearForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        models.append(model.state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_dense_layer_is_read_under_either_name(source: Path, changed: Callable[..., Path], tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if published(n) != n]:
            tensors[published(name)] = tensors.pop(name)

    folder = changed(rename)
    hf_to_dcp(folder, tmp_path / "dcp")
    dcp_to_hf(tmp_path / "dcp", tmp_path / "hf")
    assert [path.name for path in (tmp_path / "hf").glob("*.safetensors")] == ["model.safetensors"]
    assert_equal_bytes(tensors_of(tmp_path / "hf"), tensors_of(source))


def test_A_log_is_read_with_one_axis_or_four(source: Path, changed: Callable[..., Path]) -> None:
    def flatten(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("A_log")]:
            assert tensors[name].shape == (1, 1, 4, 1)
            tensors[name] = tensors[name].reshape(-1)

    folder = changed(flatten)
    a, b = (HFWeights(f, load_config(f)).read("layers.1.kda.decay.A_log") for f in (source, folder))
    assert a.shape == (4,)
    assert torch.equal(a, b)


def test_weights_are_read_one_at_a_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of tensors alive while converting: one stack of experts with its parts, or one file; never the model."""
    alive: list[tuple[weakref.ref[torch.Tensor], int]] = []
    peaks: list[int] = []

    def watched(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def inner(*args: Any) -> torch.Tensor:
            out = read(*args)
            alive[:] = [(ref, size) for ref, size in alive if ref() is not None]
            alive.append((weakref.ref(out), out.nbytes))
            peaks.append(sum(size for _, size in alive))
            return out

        return inner

    total = sum(value.nbytes for value in tensors_of(source).values())
    largest = max(2 * tensor.numel() for tensor in model_tensors(source).values())
    monkeypatch.setattr(SafetensorsFolder, "read", watched(SafetensorsFolder.read))
    monkeypatch.setattr(HFWeights, "read", watched(HFWeights.read))
    hf_to_dcp(source, tmp_path / "dcp")
    assert len(peaks) > 100
    assert max(peaks) <= 3 * largest < total / 4

    peaks.clear()
    monkeypatch.setattr(hf_checkpoint.Stored, "read", watched(hf_checkpoint.Stored.read))
    dcp_to_hf(tmp_path / "dcp", tmp_path / "hf", shard_bytes=100_000)
    assert len(peaks) > 50
    assert max(peaks) <= 100_000 + largest < total / 2


def model_tensors(folder: Path) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return load_config(folder).build().state_dict()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.pop("model.layers.1.block_sparse_moe.experts.6.w3.weight"),
            "missing: model.layers.1.block_sparse_moe.experts.6.w3.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (
            lambda t: t.update({"model.layers.2.self_attn.g_proj.weight": torch.zeros(2)}),
            "not in the model: model.layers.2.self_attn.g_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.4.input_layernorm.weight": torch.zeros(64)}),
            "not in the model: model.layers.4.input_layernorm.weight",
        ),
        (
            lambda t: t.update({"model.layers.1.block_sparse_moe.experts.8.w1.weight": torch.zeros(32, 64)}),
            "not in the model: model.layers.1.block_sparse_moe.experts.8.w1.weight",
        ),
        (
            lambda t: t.update({"model.layers.3.self_attn.q_proj.weight": torch.zeros(64, 64)}),
            "wrong shape: model.layers.3.self_attn.q_proj.weight must have shape [128, 64], got [64, 64]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_conv1d.weight": torch.zeros(64, 1, 3)}),
            "model.layers.0.self_attn.q_conv1d.weight must have shape [64, 1, 4], got [64, 1, 3]",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 64)}),
            "model.layers.0.mlp.up_proj.weight and model.layers.0.block_sparse_moe.up_proj.weight are the same tensor",
        ),
    ],
)
def test_fault_of_a_hugging_face_checkpoint_names_the_tensor(
    changed: Callable[..., Path], tmp_path: Path, change: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ValueError, match="changed") as error:
        hf_to_dcp(changed(change), tmp_path / "dcp")
    assert message in str(error.value)
    assert not (tmp_path / "dcp").exists()


def test_many_faults_are_counted(changed: Callable[..., Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n and n.endswith("w1.weight")]:
            del tensors[name]

    with pytest.raises(ValueError, match=r"missing: .*experts\.0\.w1\.weight; .* and 21 more"):
        hf_to_dcp(changed(change), tmp_path / "dcp")


def test_fault_of_a_dcp_checkpoint_names_the_tensor(source: Path, tmp_path: Path) -> None:
    hf_to_dcp(source, tmp_path / "dcp")
    config = json.loads((tmp_path / "dcp" / "config.json").read_text())
    config["moe_intermediate_size"] = 16
    (tmp_path / "dcp" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"wrong shape: layers\.1\.moe\.routed_experts\.inner_experts\.w1_EFD must have"
    ):
        dcp_to_hf(tmp_path / "dcp", tmp_path / "hf")
    with pytest.raises(ValueError, match=r"found no \.metadata"):
        dcp_to_hf(source, tmp_path / "hf")


def test_broken_files_are_named(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    first = min(folder.glob("*.safetensors"))
    first.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=rf"{first.name}: is not a safetensors file"):
        SafetensorsFolder(folder)
    first.unlink()
    with pytest.raises(ValueError, match=rf"{first.name}: is named in {INDEX} and missing"):
        SafetensorsFolder(folder)
    with pytest.raises(ValueError, match="must hold safetensors files, found none"):
        SafetensorsFolder(tmp_path)


def test_target_must_be_empty(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "precious").write_text("x")
    with pytest.raises(ValueError, match="dcp: must be a new or empty folder"):
        hf_to_dcp(source, tmp_path / "dcp")


def test_names_of_transformers_in_memory_become_names_on_disk(source: Path) -> None:
    from openkda.integrations.torchtitan.state_dict_adapter import KimiLinearStateDictAdapter, disk_names
    from openkda.parity.reference import quiet

    with quiet():
        model = transformers.KimiLinearForCausalLM.from_pretrained(source, dtype=torch.float32)
    adapter = KimiLinearStateDictAdapter(load_config(source), None)
    got = {adapter.canonical_name(name): value for name, value in disk_names(model.state_dict()).items()}
    want = tensors_of(source)
    assert {published(name) for name in want} == set(got)
    for name, value in want.items():
        assert torch.equal(got[published(name)], value.float()), name


def test_torchtitan_reads_the_converted_checkpoint(source: Path, tmp_path: Path) -> None:
    """Into a model of other dtypes, as a training run starts from it."""
    from torch.distributed.checkpoint import load

    hf_to_dcp(source, tmp_path / "dcp")
    config = load_config(source)
    model = config.build()
    state = model.state_dict()
    with hf_checkpoint._quiet():
        load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    model.load_state_dict(state)
    weights = HFWeights(source, config)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, weights.read(name).float()), name


def test_torchtitan_starts_from_files_of_transformers_directly(source: Path) -> None:
    """As its checkpointer does with `checkpoint.initial_load_in_hf`; dense layer 0 is called block_sparse_moe here."""
    from torch.distributed.checkpoint import load

    from openkda.integrations.torchtitan.state_dict_adapter import KimiLinearStateDictAdapter

    config = load_config(source)
    adapter = KimiLinearStateDictAdapter(config, str(source))
    model = config.build()
    disk = adapter.to_hf(model.state_dict())
    with hf_checkpoint._quiet():
        load(disk, storage_reader=adapter.get_hf_storage_reader(str(source)), no_dist=True)
    model.load_state_dict(adapter.from_hf(disk))
    weights = HFWeights(source, config)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights.read(name).float()), name
    with pytest.raises(NotImplementedError, match="initial_load_in_hf_quantized must be False, got True"):
        adapter.get_hf_storage_reader(str(source), from_quantized=True)
