"""Unpickle plain data and nothing else.

A pickle is a program; what makes it dangerous is that it may name any function of any module and call it. Here no name
can be looked up: dicts, lists, tuples, strings and numbers come through, and anything else is refused unrun.
"""

import io
import pickle
import pickletools
from typing import Any, NoReturn

from cpkit.errors import InputError


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise InputError(f"the pickle asks for {module}.{name}: only plain data is read, nothing of it was run")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise InputError(f"the pickle refers to an object outside itself ({pid!r}): only plain data is read")


def load_plain(data: bytes) -> Any:
    """The value of a pickle of plain data; raises InputError for any other, with the name that it asked for."""
    try:
        for opcode, argument, _ in pickletools.genops(data):  # the unpickler makes room up to the number it is given
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
                raise InputError(f"the pickle numbers more objects ({argument}) than it has bytes")
        return _PlainUnpickler(io.BytesIO(data)).load()
    except InputError:
        raise
    except Exception as error:  # damaged pickles end in errors of every kind
        raise InputError(f"not a whole pickle of plain data ({type(error).__name__}: {error})") from error
