"""The documentation is true as far as a machine can tell: examples run, links lead somewhere, commands exist."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


#: Runs every block in a namespace of its own; a traceback names the page and the line of the block.
RUN_BLOCKS = """
import pathlib, re, sys
text = pathlib.Path(sys.argv[1]).read_text()
for match in re.finditer(r"^```python\\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
    line = text[: match.start(1)].count("\\n")
    exec(compile("\\n" * line + match[1], sys.argv[1], "exec"), {})
"""


def test_readme_has_an_example():
    assert python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)
def test_examples_run(page: Path, tmp_path: Path):
    # A process of its own, as a reader would run them, with this suite's rule that a warning is an error.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", RUN_BLOCKS, str(page)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, made as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists() or (fragment and goal.suffix == ".md" and fragment not in anchors(goal)):
            broken.append(target)
    assert not broken


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs" / "decisions"
    pages = {page.name for page in folder.glob("*.md")} - {"README.md"}
    linked = set(re.findall(r"\]\((\d{3}-[\w-]+\.md)\)", (folder / "README.md").read_text()))
    assert pages == linked
    numbers = sorted(int(page[:3]) for page in pages)
    assert numbers == list(range(1, len(numbers) + 1))


def test_changelog_starts_with_unreleased():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"


def test_version_is_the_same_everywhere():
    import openkda

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert openkda.__version__ == project["version"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page: Path):
    from openkda.cli.main import build_parser

    parser = build_parser()
    commands = next(a for a in parser._actions if a.choices).choices
    wrong = []
    for command, rest in re.findall(
        r"(?:^    (?:\S*bin/)?|`)openkda ([a-z]+)([^`\n#]*)", page.read_text(), re.MULTILINE
    ):
        if command not in commands:
            wrong.append(f"openkda {command}")
            continue
        known = {option for action in commands[command]._actions for option in action.option_strings}
        # Options with a dot or an underscore belong to torchtitan.
        options = [o for o in re.findall(r"(?<=\s)(--[\w.-]+)", rest) if "." not in o and "_" not in o]
        wrong += [f"openkda {command} {option}" for option in options if option not in known]
    assert not wrong


def test_continuous_integration_runs_what_the_readme_says():
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test\n" in (ROOT / "README.md").read_text() or "make test " in (ROOT / "README.md").read_text()
    assert re.search(r"make test$", script, flags=re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
