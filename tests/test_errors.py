"""What a command line ends with."""

from __future__ import annotations

import pytest

from specjax.errors import ConfigError, command


def test_a_users_error_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command()(fails_with(ConfigError("steps is 0: give at least 1")))() == 2
    assert capsys.readouterr() == ("", "specjax: error: steps is 0: give at least 1\n")


@pytest.mark.parametrize(
    ("main_of", "line"),
    [
        (command(), "specjax: interrupted\n"),
        (command(interrupted="stopped at 3"), "specjax: stopped at 3\n"),
        (command(interrupted=""), ""),
    ],
)
def test_an_interruption_is_130(main_of, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_of(fails_with(KeyboardInterrupt()))() == 130
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("error", [ValueError("a fault"), SystemExit(3)])
def test_what_is_not_the_users_passes_through(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        command()(fails_with(error))()
    assert raised.value is error


def test_arguments_and_the_exit_code_pass() -> None:
    @command()
    def main(first: int, *, second: int = 0) -> int:
        """Adds."""
        return first + second

    assert (main(1), main(1, second=2)) == (1, 3)
    assert (main.__name__, main.__doc__) == ("main", "Adds.")


def fails_with(error: BaseException):
    """A main that raises it."""

    def main() -> int:
        raise error

    return main
