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


#: What is for one library by name, and may import it.
ONE_LIBRARY = (
    "bench",
    "cli",
    "frameworks/torch.py",
    "frameworks/paddle.py",
    "integrations",
    "kda/kernels/gluon_interpreted.py",  # for Triton's interpreter; its copies by TMA are of torch tensors
    "nn",
    "paddle",
    "parity",
    "testing",
)


def test_host_code_imports_no_library():
    # Nor at run time: so no import of ours can get the wrong one, whatever Paddle's compat mode makes of `torch`.
    package, found = FOLDER.parent, []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if name.startswith(ONE_LIBRARY):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            found += [f"{name}: {module}" for module in imported if module.split(".")[0] in ("torch", "paddle")]
    assert not found
