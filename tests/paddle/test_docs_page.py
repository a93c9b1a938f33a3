"""The examples of docs/paddle.md run, each in a process of its own. (tests/test_docs.py has no Paddle.)"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "paddle.md"
BLOCKS = re.findall(r"^```python paddle\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run(number, tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", BLOCKS[number]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_examples():
    assert len(BLOCKS) == 5
