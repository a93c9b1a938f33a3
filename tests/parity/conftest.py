"""One pair of tiny models for each gate, shared; a test that changes ours gets a copy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

with warnings.catch_warnings():
    # torch 2.13 calls deprecated parts of itself while torchtitan makes it load its compiler; nothing to act on here.
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan.trainer", reason="needs the torchtitan extra")
    pytest.importorskip("transformers", reason="needs the transformers extra")

if TYPE_CHECKING:
    from openkda.parity import Pair

HARMLESS = ("ignore:In CPU autocast, but the target dtype is not supported",)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for message in HARMLESS:
                item.add_marker(pytest.mark.filterwarnings(message))


@pytest.fixture(scope="session")
def tiny_pair() -> Pair:
    from openkda.parity import load

    return load("tiny")


@pytest.fixture(scope="session")
def bounded_pair() -> Pair:
    from openkda.parity import load

    return load("tiny-bounded")


@pytest.fixture
def copy_of() -> Callable[..., Pair]:
    """A pair whose model of ours may be changed, on its first prompts only."""

    def make(pair: Pair, prompts: int = 2) -> Pair:
        return replace(pair, ours=copy.deepcopy(pair.ours), prompts=pair.prompts[:prompts])

    return make
