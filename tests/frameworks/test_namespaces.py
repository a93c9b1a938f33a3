"""Host code is written against one set of functions: every library's namespace has them all, with the same arguments.

Read from the source, so that it holds without the libraries.
"""

import ast
from pathlib import Path

import openkda.frameworks

FOLDER = Path(openkda.frameworks.__file__).parent


def functions(library: str) -> dict[str, list[str]]:
    tree = ast.parse((FOLDER / f"{library}.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {f.name: [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)] for f in found}


def test_paddle_has_what_torch_has():
    torch, paddle = functions("torch"), functions("paddle")
    assert len(torch) > 50
    assert paddle.keys() == torch.keys()
    assert paddle == torch
