"""What all commands share: exit codes, one line for an error, one JSON object, and a start that loads nothing heavy."""

import errno
import shlex
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tests.cli.commands import assert_one_line_error, finish
from tierkv import errors
from tierkv.cli.console import BadInput, CommandGroup, Failed, print_json, reserve_stdout
from tierkv.cli.process import Terminated

# A stage in which a library catches the exception of a signal.
CATCHES = """
import os, signal, typer
from tierkv.cli.console import CommandGroup
from tierkv.cli.process import prepare_process
from tierkv.cli.progress import Progress

app = typer.Typer(cls=CommandGroup)

@app.command("work")
def work():
    with Progress().stage("load", "loading"):
        try:
            os.kill(os.getpid(), signal.{number})
        except BaseException:
            {swallow}
    print("went on")

app.command("rest")(lambda: None)
prepare_process()
app(["work"])
"""

# Lines that no signal may break, as the library has them.
HOLDS = """
import os, signal
{ignore}
from tierkv.cli import process
from tierkv.interrupts import deferred_interrupt
process.prepare_process()
with process.unwind_on_signals():
    if {ignore!r}:
        os.kill(os.getpid(), signal.SIGINT)
    try:
        with deferred_interrupt():
            os.kill(os.getpid(), signal.SIGTERM)
            print("ran whole")
    except BaseException as error:
        print(type(error).__name__)
"""

PROGRESS = """
from tierkv.cli.process import prepare_process
from tierkv.cli.progress import Progress
prepare_process()
with Progress().stage("load", "loading") as stage:
    stage.say("a detail")
print("the result")
"""


def shell(command, *, python=True):
    """Run a command line of ``tierkv``, or another, with redirections."""
    command = f"{shlex.quote(sys.executable)} -m tierkv {command}" if python else command
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False)


def run(error):
    """Run a command that raises, in a group of its own."""
    app = typer.Typer(cls=CommandGroup)

    @app.command("work")
    def work():
        raise error

    @app.command("rest")
    def rest():
        """Make the group a group."""

    return CliRunner().invoke(app, ["work"])


@pytest.mark.parametrize(
    "error",
    [
        BadInput("no such file"),
        errors.ConfigError("no such file"),
        errors.UnsupportedModel("no such file"),
        errors.UnsafeCall("no such file"),
        errors.CapacityError("no such\n   file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(error):
    assert_one_line_error(run(error), "no such file")


@pytest.mark.parametrize(
    "error",
    [
        Failed("it broke"),
        errors.TierKVError("it broke"),
        errors.StoreFull("it broke"),
        errors.BlockLost("it broke"),
        OSError(errno.ENOSPC, "it broke"),
        MemoryError("it broke"),
        RuntimeError("[enforce] it broke: you can't allocate memory"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(error):
    result = run(error)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "it broke" in result.stderr


def test_an_error_without_a_message_still_says_something():
    assert run(MemoryError()).stderr == "error: out of memory\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(KeyboardInterrupt(), 130, "interrupted\n"), (Terminated(), 143, "terminated\n"), (BrokenPipeError(), 1, "")],
)
def test_signals_and_a_reader_that_is_gone(error, code, line):
    result = run(error)
    assert (result.exit_code, result.stderr, result.stdout) == (code, line, "")


def test_a_missing_extra_says_how_to_install_it():
    result = run(ModuleNotFoundError("No module named 'transformers'", name="transformers"))
    assert_one_line_error(result, "transformers", '".[hf]"')


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), ModuleNotFoundError("a bug", name="nobody")])
def test_a_bug_keeps_its_traceback(error):
    assert run(error).exception is error


def test_bad_usage_is_one_line(cli):
    assert_one_line_error(cli("nosuch"), "nosuch", "tierkv --help")
    assert_one_line_error(cli("info", "--bogus"), "--bogus", "info --help")
    assert_one_line_error(cli("generate", "--prompt", "x"), "--model")
    assert_one_line_error(cli("--bogus"), "--bogus")
    assert_one_line_error(cli("demo", "--max-new-tokens", "many"), "--max-new-tokens")


def test_help_and_version(cli):
    assert "demo" in cli().stdout
    assert "--json" in cli("-h").stdout
    for command in ("demo", "generate", "info"):
        result = cli(command, "--help")
        assert result.exit_code == 0
        assert "Examples" in result.stdout
        assert f"tierkv {command}" in result.stdout
    assert cli("--version").stdout == "tierkv 0.1.0\n"


def test_json_leaves_stdout_to_the_object(capsys):
    with reserve_stdout(as_json=True):
        sys.stdout.write("a library talks\n")
    print_json({"text": "ü\n"})
    captured = capsys.readouterr()
    assert captured.out == '{\n  "text": "ü\\n"\n}\n'
    assert captured.err == "a library talks\n"
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"value": float("nan")})
    assert capsys.readouterr().out == ""


def test_the_command_line_starts_light():
    code = "import sys, tierkv.cli.commands; print(*({'torch', 'transformers', 'lmdb', 'triton', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_process_without_a_stdout_still_runs():
    command = f"{sys.executable} -m tierkv --version >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["--version", "--help", "info --help", "info --default-config"])
def test_a_full_disk_behind_standard_output_is_one_line(command):
    done = shell(f"{command} > /dev/full")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "error: the output cannot be written: No space left on device; send standard output somewhere else\n"
    )


def test_progress_that_nobody_can_read_does_not_end_the_work():
    done = shell(f"{shlex.quote(sys.executable)} -c {shlex.quote(PROGRESS)} 2> /dev/full", python=False)
    assert (done.returncode, done.stdout) == (0, "the result\n")


def test_a_closed_stdin_is_an_empty_one():
    done = shell("generate --model /no/such/model - <&-")
    assert (done.returncode, done.stderr) == (2, "error: standard input: the prompt is empty; give some text\n")


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.parametrize("swallow", ["pass", "raise ImportError('a library') from None"])
def test_a_signal_that_a_library_catches_still_ends_the_run(number, code, word, swallow):
    program = CATCHES.format(number=number, swallow=swallow)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{word}\n")


@pytest.mark.parametrize("ignore", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_sigterm_waits_for_the_lines_that_must_run_whole_and_an_ignored_sigint_stays_so(ignore):
    program = HOLDS.format(ignore=ignore)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran whole\nTerminated\n", "")


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_while_modules_load_ends_at_once(number, code, word):
    program = (
        "import os, signal; from tierkv.cli import process as p; p.prepare_process()\n"
        f"with p.unwind_on_signals(), p.nothing_to_clean_up(): os.kill(os.getpid(), signal.{number})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{word}\n")


def test_a_closed_pipe_ends_quietly(start):
    process = start("info", "--default-config")
    process.stdout.close()
    process.stdout = None
    code, _, stderr = finish(process)
    assert (code, stderr) == (1, "")
