"""Python imports this at its start when its folder is on PYTHONPATH: `cpkit record` puts it there.

It waits for torch.distributed to be imported, begins to record, and hands on to the sitecustomize that it hides.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))
WATCHED = "torch.distributed.distributed_c10d"


class Watch(importlib.abc.MetaPathFinder):
    """Stands first in sys.meta_path until torch.distributed is looked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module as others find it, with a loader that begins to record behind it."""
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_record(module: ModuleType) -> None:
                load(module)
                begin(module)

            spec.loader.exec_module = load_and_record  # type: ignore[method-assign]
        return spec


def begin(torch_dist: ModuleType) -> None:
    """Record from here on; what fails is said, and the program goes on."""
    try:
        if importlib.util.find_spec("cpkit") is None:
            sys.path.append(ROOT)
        from cpkit.consistency import recorder

        recorder.start(os.environ[recorder.FOLDER_VARIABLE])
    except Exception as error:
        print(f"cpkit record: this process is not recorded: {error}", file=sys.stderr)
        return
    make_world = torch_dist.init_process_group

    @functools.wraps(make_world)
    def init_process_group(*args: Any, **named: Any) -> Any:
        made = make_world(*args, **named)
        recorder.opened()
        return made

    torch_dist.init_process_group = init_process_group  # type: ignore[attr-defined]


def hand_on() -> None:
    """Run the sitecustomize that would have been found without this one."""
    others = [path for path in sys.path if os.path.abspath(path or ".") != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("CPKIT_RECORD"):
    sys.meta_path.insert(0, Watch())
hand_on()
