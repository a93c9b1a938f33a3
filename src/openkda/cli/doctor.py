"""Show versions, devices, the backend that "auto" chooses and why, and what is missing."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from openkda import __version__

# Distribution -> (what needs it, how to get it).
PACKAGES = {
    "torch": ("operators and layers on PyTorch", "pip install torch"),
    "triton": ("fused kernels on a GPU and their tests on a CPU", "pip install --no-deps triton"),
    "torchtitan": ("openkda train and generate", "pip install 'openkda[torchtitan]'"),
    "rich": ("the live progress line of openkda train", "pip install 'openkda[torchtitan]'"),
    "tokenizers": ("--tokenizer", "pip install 'openkda[torchtitan]'"),
    "datasets": ("--data with a Hugging Face dataset", "pip install 'openkda[torchtitan]'"),
    "tensorboard": ("TensorBoard logs", "pip install 'openkda[torchtitan]'"),
    "transformers": ("loading and comparing Hugging Face models", "pip install 'openkda[transformers]'"),
    "paddlepaddle": ("operators on PaddlePaddle", "pip install 'openkda[paddle]'"),
}
# The CUDA build of Paddle is another distribution with the same module.
ALIASES = {"paddlepaddle": ("paddlepaddle", "paddlepaddle-gpu")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> int:
    print(f"openkda {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print("\npackages")
    for name, (purpose, install) in PACKAGES.items():
        found = _version(name)
        print(f"  {name:13s} {found}" if found else f"  {name:13s} missing, wanted for {purpose}: {install}")
    if _version("torch"):
        print("\ndevices and backends")
        print(_indent(_torch_report()))
    return 0


def _version(name: str) -> str | None:
    for distribution in ALIASES.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _torch_report() -> str:
    import torch

    import openkda

    devices: list[Any] = [torch.device("cpu")]
    lines = [f"cpu: {torch.get_num_threads()} threads"]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        lines.append(f"cuda:{i}: {p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}")
        devices.append(torch.device("cuda", i))
    if torch.cuda.device_count() == 0:
        lines.append("no CUDA device: everything runs on the eager backend")
    for device in devices[:2]:
        lines.append(
            openkda.explain(torch.zeros(1, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None))
        )
    return "\n".join(lines)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
