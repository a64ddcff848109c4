"""Where in a program a collective is entered: the nearest lines outside torch and this package.

Engines call collectives through a wrapper of their own, so the nearest line alone is often the same for all of them:

    vllm/parallel_state.py:501 < layers/linear.py:88 < models/deepseek.py:240
"""

from pathlib import Path
from types import CodeType, FrameType

DEPTH = 3
GLUE = ("/contextlib.py", "/typing_extensions.py")
"""Wrappers that torch puts around its functions."""

_HERE = str(Path(__file__).parent)

Place = tuple[int, ...]
"""Addresses of instructions, nearest first: code holds its instructions, so where it lies and how far it came are one
number that no other code has. Much cheaper than finding line numbers."""


class Sites:
    """Finds call sites, and remembers which code is inside torch: by id, since hashing code is slow."""

    def __init__(self, torch_folder: str) -> None:
        self._folders = (torch_folder, _HERE, "<frozen ")
        self._inside: set[int] = set()
        self._outside: set[int] = set()
        self._kept: list[CodeType] = []  # so that no id is given out twice

    def place(self, frame: FrameType | None) -> Place:
        """The first DEPTH frames outside, as a key."""
        inside, outside = self._inside, self._outside
        key: list[int] = []
        while frame is not None:
            code = id(frame.f_code)
            if code in outside or (code not in inside and self._is_new_outside(frame.f_code)):
                key.append(code + frame.f_lasti)
                if len(key) == DEPTH:
                    break
            frame = frame.f_back
        return tuple(key)

    def spell(self, frame: FrameType | None) -> str:
        """folder/file:line of the same frames, nearest first."""
        lines: list[str] = []
        while len(lines) < DEPTH and frame is not None:
            if id(frame.f_code) in self._outside:
                lines.append(f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(lines) or "unknown"

    def _is_new_outside(self, code: CodeType) -> bool:
        self._kept.append(code)
        is_inside = code.co_filename.startswith(self._folders) or code.co_filename.endswith(GLUE)
        (self._inside if is_inside else self._outside).add(id(code))
        return not is_inside


def short_path(path: str) -> str:
    """The last folder and the file.  /a/b/c.py -> b/c.py"""
    return "/".join(path.split("/")[-2:])
