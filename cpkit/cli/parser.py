"""argparse as this command line uses it: errors on one line, no guessing of abbreviated flags."""

import argparse
import difflib
import math
from typing import Any, NoReturn

from cpkit.cli.exit_codes import USAGE_ERROR

SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Parser(argparse.ArgumentParser):
    """A parser whose usage errors are one line and exit code USAGE_ERROR."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse here what this command does not know: argparse leaves it to `cpkit`, which lists no flag."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near[0]}?' if near else ''}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Say what is wrong on one line of stderr and exit."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines, and flags get a wide column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=116)


def whole_number(text: str) -> int:
    """8192, or as engines take it 8k (8,000) and 8K (8,192); the nouns check the range."""
    scale = SCALES.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    try:
        return int(digits.replace(",", "")) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (8192, 8k = 8,000, 8K = 8,192)") from None


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def chance(text: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no chance: a number from 0 to 1")
    return number


def int_list(text: str) -> list[int]:
    """10,9,8 as whole numbers; an empty text is an empty list."""
    return [whole_number(part.strip()) for part in text.split(",")] if text.strip() else []
