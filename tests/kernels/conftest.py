"""Triton without a GPU: its interpreter runs the kernels, its compiler reports what they take of a device."""

import os
from importlib.util import find_spec

import pytest
import torch

FOOTPRINTS = pytest.StashKey[dict[str, dict[int, str]]]()


def _interpret() -> None:
    """Import the kernels so that Triton interprets them, and leave the environment as it was.

    Triton decides once for each function, when it is decorated. Its own library counts too, and transformers, which
    imports it, may have come first; so what was decorated already is wrapped again.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.experimental.gluon  # noqa: F401 - which Triton would import later, and then misses the variable
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        for module in (tl, tl.standard):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, name, InterpretedFunction(value.fn))

        _mend_bfloat16()

        import tierkv.kernels.triton_attention
        import tierkv.kernels.triton_blocks
        import tierkv.kernels.triton_copy  # noqa: F401
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _mend_bfloat16() -> None:
    """Make the interpreter round and multiply bfloat16 as a GPU does.

    It keeps such numbers as 16-bit integers. It multiplies those integers, and rounds to them towards zero, which makes
    errors up to twice as large as a GPU's and all of one sign.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    multiply, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def convert_float(data, before, after, rounding):
        if before != tl.float32 or after != tl.bfloat16:
            return convert(data, before, after, rounding)
        return torch.from_numpy(data).to(torch.bfloat16).view(torch.uint16).numpy()

    def create_dot(self, left, right, *rest):
        wide = [self.cast_impl(one, tl.float32) if one.dtype.scalar == tl.bfloat16 else one for one in (left, right)]
        return multiply(self, *wide, *rest)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot


if find_spec("triton") is not None and not torch.cuda.is_available():
    _interpret()


@pytest.fixture
def interpreted() -> torch.device:
    """The device of tensors for the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where CUDA is; test_triton_gpu runs the same cases")
    return torch.device("cpu")


@pytest.fixture
def report_footprint(request):
    """Take a compiled kernel's figures for the summary that ends the run."""
    table = request.config.stash.setdefault(FOOTPRINTS, {})

    def report(name: str, capability: int, kernel: dict[str, object]) -> None:
        figures = [f"{kernel[key]:>6}" for key in ("registers", "spill_bytes", "shared_bytes")]
        table.setdefault(name, {})[capability] = "".join(figures)

    return report


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Print what the compiled kernels take of a device."""
    table = config.stash.get(FOOTPRINTS, {})
    if not table:
        return
    terminalreporter.section("kernels: registers, spilled bytes, shared bytes")
    columns = sorted({capability for figures in table.values() for capability in figures})
    terminalreporter.write_line(" " * 44 + "".join(f"{f'sm_{capability}':>21}" for capability in columns))
    for name, figures in table.items():
        cells = "".join(f"{figures.get(capability, ''):>21}" for capability in columns)
        terminalreporter.write_line(f"{name:<44}{cells}")
