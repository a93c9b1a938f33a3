"""Small Kimi Linear models for the tests of this folder.

torchtitan and the loaders it uses warn about torch 2.13 on a CPU; cpu.py says why each warning is harmless. They are
let through here because pytest ignores filters that a program installs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

with warnings.catch_warnings():
    # torch 2.13 calls deprecated parts of itself while torchtitan makes it load its compiler; nothing to act on here.
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan.trainer", reason="needs the torchtitan extra")

import torch

if TYPE_CHECKING:
    from openkda.integrations.torchtitan.model import KimiLinearModel

HARMLESS = (
    "ignore:In CPU autocast, but the target dtype is not supported",
    "ignore:'set_vital' is deprecated",
    "ignore:DTensor random operators may not have complete support on cpu device mesh",
)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for message in HARMLESS:
                item.add_marker(pytest.mark.filterwarnings(message))


@pytest.fixture(scope="session", autouse=True)
def cpu_workarounds() -> None:
    from openkda.integrations.torchtitan import cpu

    cpu.install()


@pytest.fixture
def make_model() -> Callable[..., KimiLinearModel]:
    """Build the tiny model, with other sizes where given; attention masked, weights drawn from seed 0."""
    from openkda.integrations.torchtitan.builders import SIZES, model_config

    def make(flavor: str = "tiny", **sizes: Any) -> KimiLinearModel:
        torch.manual_seed(0)
        model = model_config(replace(SIZES[flavor], **sizes), attention_backend="masked").build()
        with torch.no_grad():
            model.init_states()
        return model

    return make
