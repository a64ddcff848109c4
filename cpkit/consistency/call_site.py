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
"""(id of code, instruction, id of code, instruction, ...), nearest first: much cheaper than finding line numbers."""


class Sites:
    """Finds call sites, and remembers which files are inside torch."""

    def __init__(self, torch_folder: str) -> None:
        self._inside = (torch_folder, _HERE, "<frozen ")
        self._is_inside: dict[int, bool] = {}  # by id of the code, since hashing code is slow
        self._kept: list[CodeType] = []  # so that no id is given out twice

    def place(self, frame: FrameType | None) -> tuple[Place, list[FrameType]]:
        """The first DEPTH frames outside, as a key and as they are."""
        key: list[int] = []
        frames: list[FrameType] = []
        missing = DEPTH
        while missing and frame is not None:
            code = frame.f_code
            number = id(code)
            inside = self._is_inside.get(number)
            if inside is None:
                inside = self._is_inside[number] = self._holds(code.co_filename)
                self._kept.append(code)
            if not inside:
                key += (number, frame.f_lasti)
                frames.append(frame)
                missing -= 1
            frame = frame.f_back
        return tuple(key), frames

    def _holds(self, filename: str) -> bool:
        return filename.startswith(self._inside) or filename.endswith(GLUE)


def spell_site(frames: list[FrameType]) -> str:
    """folder/file:line of each frame, nearest first."""
    return " < ".join(f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" for frame in frames) or "unknown"


def short_path(path: str) -> str:
    """The last folder and the file.  /a/b/c.py -> b/c.py"""
    return "/".join(path.split("/")[-2:])
