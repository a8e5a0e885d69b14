"""Compile a launch for an architecture without a GPU, and report what ptxas says of its registers."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from tierkv.kernels.triton_launch import VECTOR_BYTES, Launch, require

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Footprint:
    """What a compiled kernel takes of a multiprocessor.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread; memory for what does not stay in registers.
        spill_bytes: stored and loaded again because registers ran out.
        shared_bytes: of a program.
        narrowest_load: bits of the narrowest load from global memory by one thread, asynchronous copies included.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    narrowest_load: int


def compile_launch(launch: Launch, capability: int) -> Footprint:
    """Compile what ``launch`` would run on a CUDA device of a compute capability such as 90.

    Raises:
        ValueError: Triton interprets kernels in this process.
    """
    require(isinstance(launch.kernel, triton.runtime.JITFunction), "unset TRITON_INTERPRET to compile kernels")
    target = GPUTarget("cuda", capability, 32)
    compiled: Any = triton.compile(_source(launch), target=target, options=launch.options)
    ptx = compiled.asm["ptx"]
    registers, stack, spills = _assemble(ptx, capability)
    return Footprint(registers, stack, spills, compiled.metadata.shared, _narrowest_load(ptx))


def _source(launch: Launch) -> ASTSource:
    """Describe the arguments as Triton's own launcher would: their types, and what is a multiple of 16."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        multiple = False
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            multiple = True  # what the allocator returns is
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            multiple = value % VECTOR_BYTES == 0 and not parameter.do_not_specialize
        else:
            signature[parameter.name] = "fp32"
        if multiple:
            attributes[(index,)] = [["tt.divisibility", VECTOR_BYTES]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _assemble(ptx: str, capability: int) -> tuple[int, int, int]:
    """Return registers, stack bytes and spilled bytes of a kernel's PTX, by the assembler that Triton ships."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        architecture = sm_arch_from_capability(capability)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", str(source), "-o", f"{folder}/out"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if registers is None or frame is None:
        raise RuntimeError(f"ptxas reported no registers:\n{report}")
    return int(registers[1]), int(frame[1]), int(frame[2]) + int(frame[3])


def _narrowest_load(ptx: str) -> int:
    """Return the bits of the narrowest global load in PTX."""
    loads = re.findall(r"ld\.global(?:\.\w+(?:::\w+)?)*?(?:\.v(\d))?\.[bus](\d+)", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (?:0x)?(\d+)", ptx)
    widths = [int(count or 1) * int(bits) for count, bits in loads] + [8 * int(size, 16) for size in copies]
    return min(widths)
