"""Names and shapes of a published Kimi Linear checkpoint <-> names and shapes here.

    on disk                                             here
    model.layers.0.self_attn.q_proj.weight              layers.0.kda.q_proj.weight
    model.layers.0.self_attn.A_log       [1, 1, H, 1]   layers.0.kda.decay.A_log    [H]
    model.layers.0.self_attn.dt_bias     [H*K]          layers.0.kda.decay.dt_bias  [H, K]
    model.layers.3.self_attn.kv_b_proj.weight           layers.3.attention.wkv_b.weight
    model.layers.1.block_sparse_moe.experts.7.w2.weight layers.1.moe.routed_experts.inner_experts.w2_EDF[7]

Dense layers are written as `mlp.*` and layers of experts as `block_sparse_moe.*`, as the published code names them;
transformers calls both `block_sparse_moe` on disk and `mlp` in memory, and every mixture is read.

    layout            what the files of a model have to hold, name by name
    check_layout      says which tensor is missing, extra or misshapen
    disk_names        state dict of transformers' model in memory -> names on disk
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

_ROOT = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "moe.router.gate.weight": "block_sparse_moe.gate.weight",
    "moe.expert_bias_E": "block_sparse_moe.gate.e_score_correction_bias",
    "moe.shared_experts.w1.weight": "block_sparse_moe.shared_experts.gate_proj.weight",
    "moe.shared_experts.w3.weight": "block_sparse_moe.shared_experts.up_proj.weight",
    "moe.shared_experts.w2.weight": "block_sparse_moe.shared_experts.down_proj.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "kda.decay.A_log": "self_attn.A_log",
    "kda.decay.dt_bias": "self_attn.dt_bias",
    **{
        f"kda.{name}.weight": f"self_attn.{name}.weight"
        for name in (
            *("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_a_proj", "f_b_proj", "b_proj"),
            *("g_a_proj", "g_b_proj", "o_norm", "o_proj"),
        )
    },
}
_EXPERTS = {"w1_EFD": "w1", "w2_EDF": "w2", "w3_EFD": "w3"}
_EXPERTS_HERE = "moe.routed_experts.inner_experts."
_EXPERTS_ON_DISK = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_FFN = re.compile(r"(?:block_sparse_moe|mlp)\.")


class KimiLinearStateDictAdapter(StateDictAdapter):
    """Converts whole state dicts; every key must be known, and every expert of a layer present."""

    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None) -> None:
        # Only a folder with an index of several files has something to tell; the base class warns about any other.
        has_index = hf_assets_path and (Path(hf_assets_path) / "model.safetensors.index.json").is_file()
        super().__init__(model_config, hf_assets_path if has_index else None)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """State dict of the model here, as on disk.

        Raises: KeyError for a name this model does not have; NotImplementedError for sharded expert weights.
        """
        out: dict[str, Any] = {}
        for name, value in state_dict.items():
            layer, rest = _split_layer(name, "layers.")
            if layer is None:
                out[_lookup(_ROOT, name)] = value
            elif rest.startswith(_EXPERTS_HERE):
                out |= _split_experts(layer, rest.removeprefix(_EXPERTS_HERE), value)
            else:
                out[f"model.layers.{layer}.{_lookup(_BLOCK, rest)}"] = self._reshape_to_disk(rest, value)
        return out

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """State dict on disk, as the model here wants it.

        Raises: KeyError for an unknown name; ValueError when experts are missing.
        """
        root = {disk: here for here, disk in _ROOT.items()}
        out: dict[str, Any] = {}
        experts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
        for raw_name, value in hf_state_dict.items():
            name = self.canonical_name(raw_name)
            layer, rest = _split_layer(name, "model.layers.")
            if layer is None:
                out[_lookup(root, name)] = value
            elif match := _EXPERTS_ON_DISK.fullmatch(rest):
                experts.setdefault((layer, match[2]), {})[int(match[1])] = value
            else:
                here = self._name_here(int(layer), rest)
                out[f"layers.{layer}.{here}"] = self._reshape_from_disk(here, value)
        for (layer, weight), parts in experts.items():
            here = next(h for h, disk in _EXPERTS.items() if disk == weight)
            out[f"layers.{layer}.{_EXPERTS_HERE}{here}"] = self._stack_experts(int(layer), weight, parts)
        return out

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """Reader of a folder of safetensors files for torchtitan (`checkpoint.initial_load_in_hf`).

        Raises: NotImplementedError for quantized weights.
        """
        if from_quantized:
            raise NotImplementedError("kimi_linear: checkpoint.initial_load_in_hf_quantized must be False, got True")
        return _CanonicalReader(path, self.canonical_name)

    def canonical_name(self, name: str) -> str:
        """A name on disk with its feed-forward called `mlp` in a dense layer and `block_sparse_moe` in one of experts.

        Raises: KeyError for a layer that the model does not have.
        """
        layer, rest = _split_layer(name, "model.layers.")
        if layer is None:
            return name
        prefix = "mlp." if self._layer(layer, name).moe is None else "block_sparse_moe."
        return f"model.layers.{layer}.{_FFN.sub(prefix, rest, count=1) if _FFN.match(rest) else rest}"

    def _layer(self, layer: str, name: str) -> Any:
        layers = self.model_config.layers  # pyright: ignore[reportAttributeAccessIssue]
        if not layer.isdigit() or int(layer) >= len(layers):
            raise KeyError(
                f"kimi_linear: no counterpart for the parameter {name!r}; the model has {len(layers)} layers"
            )
        return layers[int(layer)]

    def _name_here(self, layer: int, rest: str) -> str:
        config = self.model_config.layers[layer]  # pyright: ignore[reportAttributeAccessIssue]
        mixer = "attention." if config.kda is None else "kda."
        names = {disk: here for here, disk in _BLOCK.items() if "self_attn" not in disk or here.startswith(mixer)}
        return _lookup(names, rest)

    def _reshape_to_disk(self, rest: str, value: torch.Tensor) -> torch.Tensor:
        if rest == "kda.decay.A_log":
            return value.reshape(1, 1, -1, 1)
        return value.reshape(-1) if rest == "kda.decay.dt_bias" else value

    def _reshape_from_disk(self, here: str, value: torch.Tensor) -> torch.Tensor:
        if here == "kda.decay.A_log":
            return value.reshape(-1)
        if here == "kda.decay.dt_bias":
            kda = next(layer.kda for layer in self.model_config.layers if layer.kda is not None)  # pyright: ignore[reportAttributeAccessIssue]
            return value.reshape(-1, kda.head_dim)
        return value

    def _stack_experts(self, layer: int, weight: str, parts: dict[int, torch.Tensor]) -> torch.Tensor:
        num_experts = self.model_config.layers[layer].moe.num_experts  # pyright: ignore[reportAttributeAccessIssue]
        missing = sorted(set(range(num_experts)) - set(parts))
        if missing:
            raise ValueError(
                f"kimi_linear: layer {layer} must have {weight} of {num_experts} experts, got none for {missing[:8]}"
            )
        return torch.stack([parts[i] for i in range(num_experts)])


class _CanonicalReader(HuggingFaceStorageReader):
    """Reads files under canonical names, whatever their feed-forward layers are called."""

    def __init__(self, path: str, canonical: Callable[[str], str]) -> None:
        super().__init__(path)
        self._canonical = canonical
        self._on_disk: dict[str, str] = {}

    def read_metadata(self) -> Metadata:
        found = super().read_metadata()
        self._on_disk = {self._canonical(name): name for name in found.state_dict_metadata}
        tensors = {name: found.state_dict_metadata[raw] for name, raw in self._on_disk.items()}
        assert found.storage_data is not None
        places = {replace(i, fqn=self._canonical(i.fqn)): place for i, place in found.storage_data.items()}
        return replace(found, state_dict_metadata=tensors, storage_data=places)

    def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
        super()._process_read_request(_Renamed(f, self._on_disk), req, planner)


@dataclass(frozen=True)
class _Renamed:
    """An open safetensors file, asked by canonical name."""

    file: Any
    on_disk: Mapping[str, str]

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(self.on_disk[name])


@dataclass(frozen=True)
class Entry:
    """One tensor of our model, and the tensors on disk that it consists of."""

    shape: tuple[int, ...]
    disk: tuple[str, ...]
    """Names on disk in order; several for the stacked experts of a layer."""
    disk_shape: tuple[int, ...]


def layout(model_config: BaseModel.Config) -> dict[str, Entry]:
    """Every persistent tensor of the model, by its name here, in the order of the model. Allocates no weights."""
    adapter = KimiLinearStateDictAdapter(model_config, None)
    with torch.device("meta"):
        state = model_config.build().state_dict()  # pyright: ignore[reportAttributeAccessIssue]
    out: dict[str, Entry] = {}
    for name, value in state.items():
        disk = adapter.to_hf({name: value})
        out[name] = Entry(tuple(value.shape), tuple(disk), tuple(next(iter(disk.values())).shape))
    return out


def check_layout(wanted: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]], *, where: str) -> None:
    """Compare names and shapes.

    Raises: ValueError naming every kind of fault, up to three tensors of each: missing, extra, wrong shape.
    """
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    wrong = [
        f"{name} must have shape {list(wanted[name])}, got {list(found[name])}"
        for name in wanted
        if name in found and list(wanted[name]) != list(found[name])
    ]
    faults = [
        f"{kind} {'; '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for kind, names in (("missing:", missing), ("not in the model:", extra), ("wrong shape:", wrong))
        if names
    ]
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults)}")


def disk_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State dict of transformers' KimiLinearForCausalLM in memory, under names on disk (views, nothing is copied).

    In memory the short convolutions are one weight, the experts two, and the gate is a module of its own. Works on
    gradients as well.
    """
    out: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        prefix = name.rpartition(".")[0]
        if name.endswith("self_attn.conv1d.weight"):
            base = prefix.removesuffix("conv1d")
            out |= {f"{base}{x}_conv1d.weight": w for x, w in zip("qkv", value.chunk(3), strict=True)}
        elif name.endswith("mlp.experts.gate_up_proj"):
            for i, (gate, up) in enumerate(w.chunk(2) for w in value):
                out[f"{prefix}.{i}.w1.weight"], out[f"{prefix}.{i}.w3.weight"] = gate, up
        elif name.endswith("mlp.experts.down_proj"):
            out |= {f"{prefix}.{i}.w2.weight": w for i, w in enumerate(value)}
        else:
            out[name.replace("self_attn.forget_gate.", "self_attn.")] = value
    return out


def _split_layer(name: str, prefix: str) -> tuple[str | None, str]:
    if not name.startswith(prefix):
        return None, name
    layer, rest = name.removeprefix(prefix).split(".", 1)
    return layer, rest


def _lookup(table: dict[str, str], name: str) -> str:
    if name not in table:
        raise KeyError(f"kimi_linear: no counterpart for the parameter {name!r}")
    return table[name]


def _split_experts(layer: str, weight: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(value, DTensor):
        if value.device_mesh.size() > 1:
            raise NotImplementedError("kimi_linear: experts must be on one device to be converted; gather them first")
        value = value.to_local()
    disk = _lookup(_EXPERTS, weight)
    return {
        f"model.layers.{layer}.block_sparse_moe.experts.{i}.{disk}.weight": expert for i, expert in enumerate(value)
    }
