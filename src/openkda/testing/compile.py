"""Compile a Triton kernel for a GPU that is not there, and report what it would use.

Needs triton (its wheel carries ptxas) but neither a GPU nor a driver; `TRITON_INTERPRET` must not be
set. Checked with triton 3.6.0 and 3.8.0, whose counts differ a little.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Bytes of shared memory one program may use: "Maximum amount of shared memory per thread block" in the table of
# technical specifications per compute capability, CUDA C++ programming guide.
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel uses; in bytes but for registers (per thread), notes and lines."""

    target: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    wgmma_notes: int  # notes of ptxas that it serialises wgmma (C7510 and its like)
    ptx_lines: int


def compile_for(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], arch: int, *, num_warps: int = 4,
    num_stages: int = 2, aligned: tuple[str, ...] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Compile `kernel` for compute capability `arch` (80, 89, 90, 100; 90 and 100 mean sm_90a and sm_100a).

    Args:
        kernel: What `@triton.jit` made.
        signature: Type of every argument that is no constant: "*bf16", "i32", "fp32", "tensordesc<bf16[64, 128]>" ...
        constants: Value of every other argument: constexpr ones, None for an absent pointer, 1 for a stride that is 1.
        aligned: Integer arguments taken as multiples of 16, as a launch finds them to be. Pointers always are.
    Returns: Triton's compiled kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if not isinstance(kernel, triton.runtime.JITFunction):
        raise TypeError(
            f"compile_for: kernel must be compiled by triton.jit, got {type(kernel).__name__}; unset TRITON_INTERPRET"
        )
    names = kernel.arg_names
    missing = [n for n in names if n not in constants and n not in signature]
    if missing:
        raise ValueError(f"compile_for: signature must name every argument, got none for {missing}")
    full = {n: "constexpr" if n in constants else signature[n] for n in names}
    is_aligned = [full[n].startswith("*") or n in (aligned or ()) for n in names]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        signature=full,
        constexprs={(i,): constants[n] for i, n in enumerate(names) if n in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, yes in enumerate(is_aligned) if yes},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, **options},
    )


def resources(compiled: Any, arch: int) -> Resources:
    """Registers, spills and shared memory of what `compile_for` gave, by ptxas."""
    import triton

    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target\s+(\w+)", ptx).group(1)  # type: ignore[union-attr]
    binaries = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        ptxas = os.path.join(binaries, "ptxas-blackwell" if arch >= 100 else "ptxas")
        command = [ptxas, "-v", "--gpu-name=" + target, path, "-o", os.path.join(folder, "kernel.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.search(r"Used (\d+) registers", log)
    if not spills or used is None:
        raise RuntimeError(f"resources: ptxas must report registers and spills, got {log!r}")
    stack, stores, loads = (sum(map(int, column)) for column in zip(*spills, strict=True))  # noinline functions too
    return Resources(
        target=target,
        registers=int(used.group(1)),
        stack=stack,
        spill_stores=stores,
        spill_loads=loads,
        shared=compiled.metadata.shared,
        wgmma_notes=len(re.findall(r"\(C75\d\d\)", log)),
        ptx_lines=ptx.count("\n"),
    )


def unwritten_uniform_registers(compiled: Any) -> list[str]:
    """Instructions of an sm_90a kernel that read a uniform register before any instruction, in order, has written it.

    ptxas 12.8 (Triton 3.6) makes some: the address of a wgmma operand then is what the register happens to hold.
    """
    import triton

    binaries = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(compiled.asm["cubin"])
        command = [os.path.join(binaries, "nvdisasm"), "-c", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    written, found = {63}, []  # 63 is the constant 0
    for line in re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE):
        reads, writes = _uniform_registers(re.sub(r"^@!?U?P\d+\s+", "", line).strip())
        if not reads <= written:
            found.append(line.strip())
        written |= writes
    return found


def _uniform_registers(instruction: str) -> tuple[set[int], set[int]]:
    """Numbers of the uniform registers that a SASS instruction reads, and of those that it writes."""
    name, _, rest = instruction.partition(" ")
    operands = [{int(n) for n in re.findall(r"\bUR(\d+)", part)} for part in rest.split(",")]
    if "gdesc" in rest:  # four registers; the first two are of an operand A in shared memory
        (first,) = (int(n) for n in re.findall(r"gdesc\[UR(\d+)\]", rest))
        others = set().union(*operands) - {first}
        return others | set(range(first + (2 if re.match(r"R\d+, R\d+", rest) else 0), first + 4)), set()
    if not name.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX")):
        return set().union(*operands), set()
    reads, writes = set().union(*operands[1:]), operands[0]
    if ".64" in name or ".WIDE" in name:
        writes = {*writes, *(n + 1 for n in writes)}
    if ".64" in name:
        reads = {*reads, *(n + 1 for n in reads)}
    return reads, writes


def report(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], arch: int, **options: Any
) -> Resources:
    """`compile_for` and `resources` in one call."""
    return resources(compile_for(kernel, signature, constants, arch, **options), arch)
