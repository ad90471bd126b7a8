"""How far a run has come: a bar on a terminal, a line for each batch elsewhere."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Counts prompts, or other `things` with their `pieces`; draws on `console` and loses no Ctrl-C.

    Python drops a KeyboardInterrupt that is raised inside a callback of its garbage collector, and JAX has
    one there: the interrupt is then raised again at the next status.
    """

    def __init__(
        self, total: int, finished: int, console: Console, things: str = "prompts", pieces: str = "tokens"
    ) -> None:
        self._total, self._finished, self._console = total, finished, console
        self._things, self._pieces = things, pieces
        self._started, self._count, self._num_pieces = time.monotonic(), 0, 0
        self._interrupted = False
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=total, completed=finished, rate="")

    def __enter__(self) -> Progress:
        self._bar.start()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def status(self, what: str) -> None:
        """Say what is being done now; KeyboardInterrupt if one was lost."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self._console.is_terminal:
            self._bar.update(self._task, description=what)
        elif what.startswith("compiling"):
            self._line(what)

    def advance(self, num_things: int, num_pieces: int) -> None:
        """Say that so many prompts are finished, and how many tokens all methods wrote for them."""
        self._count, self._num_pieces = self._count + num_things, self._num_pieces + num_pieces
        done = self._finished + self._count
        elapsed = time.monotonic() - self._started
        rate = f"{self._num_pieces / elapsed:.1f} {self._pieces}/s"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, rate=rate)
        else:
            left = elapsed / self._count * (self._total - done)
            self._line(f"{done}/{self._total} {self._things}, {rate}, about {left:.0f} s left")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
