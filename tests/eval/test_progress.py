"""Progress off a terminal, and interrupts that would be lost."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from specjax.eval.progress import Progress


def test_lines_tell_count_rate_and_time_left() -> None:
    console = Console(file=io.StringIO(), width=20)
    with Progress(3, 1, console) as progress:
        progress.status("compiling x for a long while")
        progress.status("decoding x")
        progress.advance(1, 10)
    compiling, done = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert compiling == "compiling x for a long while"
    assert done.startswith("2/3 prompts, ") and "tokens/s, about 0 s left" in done


def test_interrupt_that_was_swallowed_is_raised_at_the_next_status() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Progress(1, 0, Console(file=io.StringIO())) as progress:
            progress.status("a")
            with pytest.raises(KeyboardInterrupt):  # which a garbage collector's callback would swallow
                os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                progress.status("b")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
