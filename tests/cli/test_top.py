"""``tierkv top``: what it prints of running processes, what it refuses, and how it ends."""

import errno
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object
from tests.publishing import EngineProcess


@pytest.fixture
def child(runtime):
    with EngineProcess(runtime, engines=2) as one:
        assert one.tell(12) == "computed"
        yield one


def failed(result, *words):
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize("options", [[], ["--once"], ["--json"], ["--pid", "7"]])
def test_without_an_engine_it_fails_with_one_line(cli, runtime, options):
    words = ["process 7 has no tierkv engine"] if "--pid" in options else ["no tierkv engine is running for this user"]
    failed(cli("top", *options), *words)


def test_one_that_publishes_where_others_may_write_is_named(cli, child):
    child.socket.parent.chmod(0o777)
    failed(cli("top", "--once"), "no tierkv engine is running", f"chmod 700 {child.socket.parent}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pid", "0"], ["--pid"]),
        (["--pid", "many"], ["--pid"]),
        (["--interval", "0"], ["--interval"]),
        (["--interval", "nan"], ["--interval", "3600"]),
        (["--prometheus", "70000"], ["--prometheus"]),
        (["--prometheus", "9400", "--json"], ["--prometheus and --json exclude each other"]),
        (["--prometheus", "9400", "--once"], ["--prometheus and --once"]),
        (["--prometheus", "9400", "--pid", "3"], ["--prometheus and --pid"]),
        (["--one"], ["--one"]),
    ],
)
def test_bad_options_are_one_line(cli, runtime, options, words):
    assert_one_line_error(cli("top", *options), *words)


def test_a_taken_port_is_one_line(cli, runtime):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        assert_one_line_error(cli("top", "--prometheus", port), f"--prometheus {port}", "in use", "give another port")


def test_help_has_examples(cli):
    done = cli("top", "--help")
    assert done.exit_code == 0
    assert "Examples" in done.stdout
    assert "tierkv top --prometheus 9400" in done.stdout


def test_one_snapshot_as_json(cli, child, runtime):
    with EngineProcess(runtime) as other:
        result = one_object(cli("top", "--json").stdout)
        assert {process["pid"] for process in result["processes"]} == {child.pid, other.pid}
        done = cli("top", "--json", "--once", "--pid", child.pid)
        assert done.stderr == ""
        result = one_object(done.stdout)
    assert (result["version"], result["silent"], result["refused"]) == (1, {}, [])
    (process,) = result["processes"]
    assert process["pid"] == child.pid
    assert "python" in process["command"]
    assert [engine["name"] for engine in process["engines"]] == ["tiny-0", "tiny-1"]
    for engine in process["engines"]:
        assert engine["stats"]["counters"]["tokens"] == 12
        assert engine["stats"]["tiers"]["device"]["blocks"] == 3


def test_one_snapshot_as_tables(cli, child):
    done = cli("top", "--once")
    assert done.exit_code == 0
    assert f"tiny-0 · pid {child.pid} · engine 1" in done.stdout
    assert f"tiny-1 · pid {child.pid} · engine 2" in done.stdout
    assert re.search(r"device +━+\S* +7\.37KiB +16KiB +46\.1% +7\.37KiB +3 +0", done.stdout), done.stdout
    assert re.search(r"host +off", done.stdout)
    assert "12 tokens in 1 forwards" in done.stdout


def test_another_process_is_named_where_one_has_none(cli, child):
    failed(cli("top", "--pid", "7"), "process 7 has no tierkv engine", f"those that have: {child.pid}")


def test_a_pipe_gets_a_line_an_engine_until_the_last_one_closes(start, child):
    process = start("top", "--pid", child.pid, "--interval", "0.1")
    first = [process.stdout.readline() for _ in range(2)]
    assert re.fullmatch(
        rf"\d\d:\d\d:\d\d pid={child.pid} engine=1 model=tiny-0 tokens/s=- device=46\.1% stall/token=0\.00ms overlap=- "
        r"prefix=- queued=0B\n",
        first[0],
    ), first[0]
    assert "engine=2" in first[1]
    assert child.tell(20) == "computed"
    while "tokens/s=0.0" in (line := process.stdout.readline()):
        pass
    assert float(line.partition("tokens/s=")[2].split()[0]) > 1
    assert child.tell("close") == "closed"
    code, _, stderr = finish(process)
    assert (code, stderr) == (0, "the last engine was closed\n")


def test_a_reader_that_goes_ends_it(child, clean_environment):
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m tierkv top --interval 0.1 | head -1"],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_it_with_one_line(start, child, number, code, word):
    process = start("top", "--pid", child.pid, "--interval", "30")
    process.stdout.readline()
    process.send_signal(getattr(signal, number))
    found, _, stderr = finish(process)
    assert (found, stderr) == (code, f"{word}\n")
    assert child.tell(1) == "computed"  # whoever is watched does not notice


@contextmanager
def on_terminal(stream, *args):
    """Run a command one of whose streams is a terminal; give the process, and what it draws."""
    ours, theirs = pty.openpty()
    screen = bytearray()

    def read():
        while True:
            try:
                received = os.read(ours, 1 << 16)
            except OSError as error:
                assert error.errno == errno.EIO  # the other side is closed
                return
            if not received:
                return
            screen.extend(received)

    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv", *map(str, args)], stdin=theirs, text=True,
        stdout=theirs if stream == "stdout" else subprocess.PIPE,
        stderr=theirs if stream == "stderr" else subprocess.PIPE,
        env={
            **os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "100",
            "LINES": "60",
        },
    )  # fmt: skip
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, screen
    finally:
        process.kill()
        reader.join(20)
        os.close(ours)


def test_on_a_terminal_it_draws_and_leaves_the_cursor(child, clean_environment):
    with on_terminal("stdout", "top", "--pid", child.pid, "--interval", "0.1") as (process, screen):
        deadline = time.monotonic() + 60
        while screen.count(b"tiny-1") < 3:
            assert time.monotonic() < deadline, bytes(screen)
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        code, _, stderr = finish(process)
    assert (code, stderr) == (130, "interrupted\n")
    assert b"0.0 tokens/s" in screen
    assert screen.rindex(b"\x1b[?25h") > screen.rindex(b"\x1b[?25l")  # shown again after it was hidden


@pytest.mark.slow
def test_generate_shows_its_own_engine(tiny, clean_environment):
    args = ("generate", "--model", tiny, "--prompt", "A stitch in time", "--max-new-tokens", 120)
    with on_terminal("stderr", *args, "--live") as (process, screen):
        code, text, _ = finish(process)
    assert code == 0
    assert b"tiny" in screen
    assert b"engine 1" in screen
    assert re.search(rb"[1-9][\d,]* tokens in [1-9]", screen)
    assert screen.rindex(b"\x1b[?25h") > screen.rindex(b"\x1b[?25l")
    # Where there is no terminal it streams as ever.
    done = subprocess.run(
        [sys.executable, "-m", "tierkv", *map(str, args), "--live"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout == text
    assert len(text) > 120
    assert "engine 1" not in done.stderr


def test_prometheus_is_served_until_a_signal(start, child, runtime):
    process = start("top", "--prometheus", port := free_port())
    line = process.stderr.readline()
    assert line == f"serving http://127.0.0.1:{port}/metrics until Ctrl-C\n"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        text = response.read().decode()
    assert f'tierkv_tokens_total{{engine="2",model_name="tiny-1",pid="{child.pid}"}} 12.0' in text
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "interrupted\n")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_it_loads_no_torch(runtime):
    code = (
        "import sys; from tierkv.cli.commands import app; "
        "app(['top', '--once'], standalone_mode=False); "
        "import tierkv.watch, tierkv.prometheus, tierkv.cli.top_show; "
        "print(*({'torch', 'transformers', 'lmdb'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == ""
