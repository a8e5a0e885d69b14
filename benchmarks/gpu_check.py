"""Everything there is to know of a CUDA machine, in one run and one JSON file.

    python -m tierkv.benchmarks.gpu_check --out benchmarks/results/gpu-NAME.json

Each section runs in a process of its own, so that none takes another down; its figures are on disk the moment they are
known. ``--rehearse`` runs the same lines on a CPU with tiny sizes.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

ROOT: Final = Path(__file__).resolve().parents[1]
BUDGET_SECONDS: Final = 340.0
LEAST_SECONDS: Final = 15.0
"""A section that would get less is not begun."""


class Section(NamedTuple):
    """One question; ``limit`` is the most seconds that it may take."""

    name: str
    limit: float


SECTIONS: Final = {
    1: Section("cuda_tests", 90),
    2: Section("kernel_correctness", 65),
    3: Section("decode_attention_bandwidth", 40),
    4: Section("copies", 45),
    5: Section("decode", 190),
}
_OUTCOME: Final = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def main() -> int:
    """Run the chosen sections; return the exit code."""
    options = _options()
    if options.child:
        return _child(options)
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        print("gpu_check needs a CUDA device and there is none; --rehearse runs it on the CPU", file=sys.stderr)
        return 2
    from tierkv.benchmarks import machine

    began = time.monotonic()
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "tierkv.benchmarks.gpu_check", *sys.argv[1:]]),
        "rehearsal_on_a_cpu": options.rehearse,
        "began_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "budget_seconds": options.budget_seconds,
        "machine": machine.description() | _more_of_the_machine(torch),
        "sections": {},
    }
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    code = 0
    _write(options.out, report)
    try:
        for number in options.sections:
            left = options.budget_seconds - (time.monotonic() - began)
            _run(number, min(SECTIONS[number].limit, left), options, report)
    except KeyboardInterrupt:
        code = 130
        report["interrupted"] = True
        print("interrupted; what was measured is kept", file=sys.stderr)
    report["total_seconds"] = time.monotonic() - began
    _write(options.out, report)
    print(f"{options.out}", file=sys.stderr)
    bad = [name for name, one in report["sections"].items() if one["status"] != "done"]
    return code or (1 if bad else 0)


def _run(number: int, limit: float, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Run one section within ``limit`` seconds and put what became of it into the report, which is written."""
    section = SECTIONS[number]
    label = f"[{number}/{len(SECTIONS)}] {section.name}"
    result: dict[str, Any] = {"status": "skipped", "limit_seconds": round(limit, 1)}
    report["sections"][f"{number}_{section.name}"] = result
    if limit < LEAST_SECONDS:
        result["reason"] = f"only {max(0.0, limit):.0f} s of the budget were left"
        print(f"{label}: skipped, {result['reason']}", file=sys.stderr)
        _write(options.out, report)
        return
    print(f"{label}: at most {limit:.0f} s", file=sys.stderr, flush=True)
    began = time.monotonic()
    result["status"] = "interrupted"
    with tempfile.TemporaryDirectory(prefix="tierkv-gpu-") as folder:
        part = Path(folder, "part.json")

        def collect() -> None:
            result["seconds"] = round(time.monotonic() - began, 1)
            if part.exists():
                result.update(json.loads(part.read_text(encoding="utf-8")))
            _write(options.out, report)

        try:
            if number == 1:
                _tests(limit, options, part, result, collect)
            else:
                _section(number, limit, options, part, result, collect)
        except OSError as error:
            result |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        finally:
            collect()
    print(f"{label}: {result['status']} after {result['seconds']} s {result.get('error', '')}", file=sys.stderr)


def _section(
    number: int, limit: float, options: argparse.Namespace, part: Path, result: dict[str, Any], collect: Any
) -> None:
    command = [sys.executable, "-m", "tierkv.benchmarks.gpu_check", "--child", str(number), "--out", str(part)]
    command += ["--budget-seconds", str(limit)] + ["--rehearse"] * options.rehearse
    code = _wait(command, limit, None, collect)
    collect()
    if code is None:
        result |= {"status": "cut short", "error": f"stopped at its limit of {limit:.0f} s"}
    elif code or result.get("errors"):
        result["status"] = "failed"
        result.setdefault("error", "; ".join(result.get("errors", [])) or f"its process ended with code {code}")
    else:
        result["status"] = "done"


def _tests(
    limit: float,
    options: argparse.Namespace,
    part: Path,
    result: dict[str, Any],
    collect: Any,
) -> None:
    """Run the tests that need a GPU, in as many processes as there are cores to compile kernels with."""
    marked = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark." + "gpu" in path.read_text("utf-8")]
    files = [str(path.relative_to(ROOT)) for path in marked]
    if options.rehearse:
        files = [name for name in files if name.endswith("test_transfer_cuda.py")]
    if not files:
        result |= {"status": "skipped", "reason": "the tests are not here: this needs a checkout"}
        return
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", *files]
    if importlib.util.find_spec("xdist") and not options.rehearse:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    result["command"] = shlex.join(["python", *command[1:]])
    output = part.with_name("output")
    with output.open("w", encoding="utf-8") as file:
        code = _wait(command, limit, file, collect)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    ended = next((at for at, line in enumerate(lines) if "short test summary" in line), len(lines))
    counts: dict[str, int] = {}
    for line in lines[:ended]:
        if "::" in line and (found := _OUTCOME.search(line)):
            counts[found[1].lower()] = counts.get(found[1].lower(), 0) + 1
    result["outcomes"] = counts
    result["summary"] = next((line.strip("= ") for line in reversed(lines) if " in " in line and "=" in line), "")
    bad = [line[:300] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if bad:
        result["failures"] = bad[:40]
    if code is None:
        result |= {"status": "cut short", "error": f"stopped at its limit of {limit:.0f} s"}
    elif code:
        result |= {"status": "failed", "error": result["summary"] or f"pytest ended with code {code}"}
    else:
        result["status"] = "done"
    if result["status"] != "done":
        result["output_tail"] = "\n".join(lines)[-8000:]


def _wait(command: list[str], limit: float, output: TextIO | None, collect: Any) -> int | None:
    """Run a command in a process group of its own; return its exit code, or None where it had to be stopped."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    deadline = time.monotonic() + limit
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output or sys.stderr,
        stderr=subprocess.STDOUT if output else None, process_group=0,
    )  # fmt: skip
    try:
        while time.monotonic() < deadline:
            try:
                return process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                collect()
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                break
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                continue
        process.wait()


def _child(options: argparse.Namespace) -> int:
    """Run one section here; the parent reads its figures from the file."""
    import torch

    from tierkv.benchmarks.gpu_common import Record, one_line

    device = torch.device("cpu") if options.rehearse else torch.device("cuda", 0)
    deadline = time.monotonic() + options.budget_seconds - (2 if options.rehearse else 12)  # imports, and the end
    if options.rehearse:
        torch.set_num_threads(1)  # tiny work beside that of others
    record = Record(options.out, deadline, options.rehearse, device)
    try:
        if options.child == 2:
            from tierkv.benchmarks.gpu_kernels import check_attention as work
        elif options.child == 3:
            from tierkv.benchmarks.gpu_kernels import measure_bandwidth as work
        elif options.child == 4:
            from tierkv.benchmarks.gpu_copies import measure_copies as work
        else:
            from tierkv.benchmarks.gpu_decode import measure_decode as work
        work(record)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        record.put(error=one_line(error))
        return 1
    return 0


def _more_of_the_machine(torch: Any) -> dict[str, Any]:
    more: dict[str, Any] = {"cuda_runtime": torch.version.cuda}
    try:
        more["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        more["triton"] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        more["device_memory_bytes"] = properties.total_memory
        more["multiprocessors"] = properties.multi_processor_count
        more["compute_capability"] = f"{properties.major}.{properties.minor}"
    return more


def _write(path: Path, report: dict[str, Any]) -> None:
    from tierkv.benchmarks.gpu_common import write_json

    write_json(path, report)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--sections", type=_numbers, default=list(SECTIONS), help="for example 1,3; all by default")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes: tests this script")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS, help="for all sections together")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    numbers = [int(one) for one in text.split(",")]
    if not numbers or any(one not in SECTIONS for one in numbers):
        raise argparse.ArgumentTypeError(f"legal: some of {','.join(map(str, SECTIONS))}")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
