"""Imports go one way, from what users see down to the tensor library: read from the source, without importing it.

Only imports at the top of a module count. One inside a function runs when it is called and makes no cycle; `explain`
looks up at the operators that way.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

#: A module may import from its own row and from rows above it. A longer prefix wins over a shorter one.
ROWS = (
    ("openkda.errors",),
    ("openkda.frameworks",),
    ("openkda.checks", "openkda.packing", "openkda.backends", "openkda.parallel"),
    ("openkda.kda.kernels",),
    ("openkda.kda", "openkda.conv", "openkda.norm"),
    ("openkda.nn", "openkda.paddle", "openkda.testing"),
    ("openkda.integrations",),
    ("openkda.parity", "openkda.bench"),
    ("openkda.cli",),
)
#: Versions of the same maths: none may lean on another, or testing one against the other would prove less.
APART = ("reference", "eager", "kernels")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted((SOURCE / "openkda").rglob("*.py"))}


def row_of(module: str) -> int:
    rows = [(len(prefix), i) for i, row in enumerate(ROWS) for prefix in row if f"{module}.".startswith(f"{prefix}.")]
    return max(rows)[1] if rows else -1  # openkda itself: names only


def imports(path: Path) -> Iterator[str]:
    """Names of this package that a module imports when it is imported; `if TYPE_CHECKING` blocks are left out."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("openkda."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "openkda":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "openkda"])
def test_module_imports_downwards_only(module: str):
    upwards = [name for name in imports(MODULES[module]) if row_of(name) > row_of(module)]
    assert not upwards, f"{module} stands below {upwards}"


def test_every_module_has_a_row():
    assert [m for m in MODULES if m != "openkda" and row_of(m) < 0] == []


@pytest.mark.parametrize("module", [m for m in MODULES if any(part in m.split(".") for part in APART)])
def test_versions_of_the_maths_do_not_import_one_another(module: str):
    (own,) = (part for part in APART if part in module.split("."))
    operator = module.split(f".{own}")[0]  # openkda.kda, openkda.conv, openkda.norm
    others = [f"{operator}.{part}" for part in APART if part != own]
    leaning = [n for n in imports(MODULES[module]) if any(f"{n}.".startswith(f"{other}.") for other in others)]
    assert not leaning
