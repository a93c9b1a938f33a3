"""Code written for fla (flash-linear-attention) on openkda, without a change:

    import openkda.integrations.fla
    openkda.integrations.fla.install()

    from fla.modules import FusedRMSNormGated, ShortConvolution
    from fla.ops.kda import chunk_kda
    from fla.ops.utils.index import prepare_cu_seqlens_from_mask, prepare_lens_from_mask
    from fla.utils import tensor_cache

`install` answers `import fla` from now on with modules that hold the names below and nothing else, with the signatures
of fla 0.6.0. The layers are PyTorch's; or Paddle's, where fla is first imported in a Paddle compat scope that names it,
or Paddle alone is installed. Without `install`, `openkda.integrations.fla` has the same operators and layers.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from openkda import frameworks

_OPS = "openkda.integrations.fla.ops"
#: Module of fla -> its names, each with the module of openkda that has it; None for a layer.
NAMES: dict[str, dict[str, str | None]] = {
    "fla": {},
    "fla.modules": {"FusedRMSNormGated": None, "ShortConvolution": None},
    "fla.ops": {},
    "fla.ops.kda": {"chunk_kda": _OPS, "fused_recurrent_kda": _OPS},
    "fla.ops.kda.gate": {"fused_kda_gate": _OPS},
    "fla.ops.utils": {},
    "fla.ops.utils.index": {
        "prepare_chunk_indices": "openkda.packing",
        "prepare_cu_seqlens_from_mask": "openkda.packing",
        "prepare_lens_from_mask": "openkda.packing",
    },
    "fla.utils": {"tensor_cache": "openkda.packing"},
}


def install() -> None:
    """Let `import fla` and what is below it find openkda. Further calls do nothing.

    Raises: RuntimeError if fla itself is imported already: half of a program would go on using it.
    """
    if _FINDER in sys.meta_path:
        return
    if "fla" in sys.modules:
        where = getattr(sys.modules["fla"], "__file__", None)
        raise RuntimeError(
            f"openkda.integrations.fla: install must be called before fla is imported, got fla from {where}; "
            "call it first thing in the program"
        )
    sys.meta_path.insert(0, _FINDER)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of NAMES and fills them."""

    layers: str | None = None  # the module that all layers come from, settled at the first import

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in NAMES:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=__name__, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        in_scope = frameworks.torch_is_paddle("fla")
        if self.layers is None:
            self.layers = _layers(in_scope)
        for name, home in NAMES[module.__name__].items():
            setattr(module, name, getattr(importlib.import_module(home or self.layers), name))
        if module.__name__ == "fla" and in_scope:  # all of it now: nothing may be imported once the scope is over
            for name in NAMES:
                importlib.import_module(name)


_FINDER = _Finder()


def _layers(in_scope: bool) -> str:
    """The module of the layers: Paddle's in its compat scope and where it is the only library, else PyTorch's."""
    only_paddle = not frameworks.installed("torch") and frameworks.installed("paddle")
    return "openkda.integrations.fla." + ("paddle_layers" if in_scope or only_paddle else "layers")


def __getattr__(name: str) -> Any:
    for names in NAMES.values():
        if name in names:
            return getattr(importlib.import_module(names[name] or _FINDER.layers or _layers(False)), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
