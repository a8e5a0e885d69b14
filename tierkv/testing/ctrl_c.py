"""Ctrl-C at a chosen place: every place where CPython looks for signals can be tried, one after the other."""

import dis
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

OWN = str(Path(__file__).resolve().parents[1])
STANDARD = sysconfig.get_path("stdlib")
FOREIGN = ("site-packages", "dist-packages", str(Path(__file__).resolve().parent))


def interrupts(first: int = 0, step: int = 1) -> Iterator["Interrupt"]:
    """Yield interrupts at place ``first``, ``first + step`` and so on, until one was not reached."""
    place = first
    while True:
        interrupt = Interrupt(place)
        yield interrupt
        if not interrupt.is_sent:
            return
        place += step


class Interrupt:
    """SIGINT at one place of a call.

    A place is where CPython runs signal handlers: behind a call, at the start of a function, at the end of a loop's
    body. Those in this library and in the standard library are counted, in the order in which they are reached.

    Attributes:
        is_sent: the place was reached.
        where: function and line.
    """

    def __init__(self, place: int) -> None:
        self.is_sent = False
        self.where = ""
        self._left = place

    def during(self, call: Callable[[], object]) -> bool:
        """Run ``call``; return whether KeyboardInterrupt came out of it. Other exceptions pass.

        Raises:
            AssertionError: Ctrl-C was pressed, and nothing came out.
        """
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        assert not self.is_sent, f"Ctrl-C was swallowed: {self}"
        return False

    def __repr__(self) -> str:
        return f"Ctrl-C in {self.where or 'no place'}"

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG002 - as sys.settrace wants it
        name = frame.f_code.co_filename
        if not name.startswith((OWN, STANDARD)) or any(part in name for part in FOREIGN):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code.co_code
        looks = True  # the start of the function

        def local(frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG001
            nonlocal looks
            if event != "opcode":
                looks = looks and event != "exception"  # what a call raised is handled before anything else
                return local
            if looks and not self.is_sent:
                if self._left == 0:
                    self.is_sent = True
                    self.where = f"{frame.f_code.co_qualname}, {Path(name).name}:{frame.f_lineno}"
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)
                self._left -= 1
            operation = dis.opname[code[frame.f_lasti]]
            looks = operation.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            return local

        return local
