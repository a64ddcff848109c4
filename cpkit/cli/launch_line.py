"""Launch lines of engines, as people paste them: which flags say something about context parallelism or memory.

    VLLM_USE_DIRECT_DCP_A2A=1 vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 -dcp 4 --port 8000
    python -m sglang.launch_server --model-path zai-org/GLM-5.2 --tp 8 --dcp-size 8

What no rule and no size depends on is listed as ignored, never dropped.
"""

import argparse
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cpkit.cli.launch_flags import ENVIRONMENT, SGLANG_FLAGS, SWITCHES, VLLM_FLAGS, Flag, in_our_words
from cpkit.cli.parser import positive_number, whole_number
from cpkit.errors import InputError

STARTS = {
    ("vllm", "serve"): "vllm",
    ("python", "-m", "vllm.entrypoints.openai.api_server"): "vllm",
    ("python", "-m", "sglang.launch_server"): "sglang",
    ("sglang", "serve"): "sglang",
}


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """What a line says. model: as written; settings: by the names of Deployment's fields and of the limits.

    ignored: what nothing here depends on, as written; read_as: what was taken in a sense that is not the flag's own.
    """

    engine: str
    model: str
    settings: dict[str, Any]
    ignored: tuple[str, ...]
    read_as: tuple[str, ...]


def read_launch_line(words: Sequence[str]) -> LaunchLine:
    """Read a line that is already cut into words, or one string of it; raises InputError."""
    if len(words) == 1:
        words = shlex.split(words[0])
    reader = _Reader()
    rest = reader.read_environment(list(words))
    engine, rest = _engine(rest)
    reader.read_flags(rest, VLLM_FLAGS if engine == "vllm" else SGLANG_FLAGS, positional=engine == "vllm")
    settings = reader.settings
    model = settings.pop("model", None)
    if model is None:
        lost = f"; ignored were {', '.join(reader.ignored)}" if reader.ignored else ""
        raise InputError(f"{shlex.join(words)}: no model in this line{lost}")
    if engine == "sglang":
        _attention_dp(settings)
    return LaunchLine(engine, model, settings, tuple(reader.ignored), tuple(reader.read_as))


def _engine(words: list[str]) -> tuple[str, list[str]]:
    for start, engine in STARTS.items():
        plain = [re.sub(r"^(.*/)?python[\d.]*$", "python", words[0]) if words else "", *words[1:]]
        if tuple(plain[: len(start)]) == start:
            return engine, words[len(start) :]
    known = " or ".join(" ".join(start) for start in STARTS)
    raise InputError(
        f"{shlex.join(words[:3]) or 'nothing'} starts no engine that is known here: paste a line of {known}"
    )


def _attention_dp(settings: dict[str, Any]) -> None:
    """SGLang: data parallelism cuts the TP group where attention-DP is on, and adds replicas elsewhere."""
    if settings.pop("dp_attention", False):
        settings["attn_dp"] = settings.pop("dp", 1)


class _Reader:
    """Collects what words say."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.ignored: list[str] = []
        self.read_as: list[str] = []

    def read_environment(self, words: list[str]) -> list[str]:
        """Variables in front of the command; returns the words behind."""
        if words[:1] == ["env"]:
            words = words[1:]
        while words and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0])):
            flag = ENVIRONMENT.get(words[0]) or ENVIRONMENT.get(found[1])
            if flag is None:
                self.ignored.append(words[0])
            else:
                self._take(found[1], flag, found[2])
            words = words[1:]
        return words

    def read_flags(self, words: list[str], flags: dict[str, Flag], *, positional: bool) -> None:
        """Flags and their values; positional: the first other word is the model."""
        words = list(words)
        while words:
            word = words.pop(0)
            if not word.startswith("-"):
                if positional and "model" not in self.settings:
                    self.settings["model"] = word
                else:
                    self.ignored.append(word)
                continue
            name, equals, value = word.partition("=")
            name, _, inner = name.partition(".") if name.startswith("-") else (name, "", "")
            name = name if len(name) < 3 or name[1] != "-" else name.replace("_", "-")
            name = self._full_name(name, flags)
            flag = flags.get(name)
            bare = (flag is not None and flag.switch) or name in SWITCHES or name.startswith("--no-")
            if not equals and not bare and words and not _is_flag(words[0]):
                value, equals = words.pop(0), " "
            if flag is None:
                self.ignored.append(f"{word.partition('=')[0]}{equals}{value}")
            elif inner:
                self._take(f"{name}.{inner}", flag, json.dumps({inner: value}))
            else:
                self._take(name, flag, value)

    def _full_name(self, name: str, flags: dict[str, Flag]) -> str:
        """The flag that a shortened one stands for, as the engines' argparse takes it; others as they are."""
        if name in flags or name in SWITCHES:
            return name
        if (stuck := re.fullmatch(r"(-[a-z]+)(\d+)", name)) and stuck[1] in flags:
            raise InputError(f"{name} is no flag: write {stuck[1]} {stuck[2]}")
        longer = [known for known in flags if known.startswith(name)] if re.match("--[a-z]", name) else []
        if not longer or any(flags[known] != flags[longer[0]] for known in longer):
            return name
        self.read_as.append(f"{name} as {longer[0]}")
        return longer[0]

    def _take(self, name: str, flag: Flag, text: str) -> None:
        """One setting, or several out of JSON."""
        if flag.switch:
            self._set(flag.sets, flag.value)
            return
        if not text:
            raise InputError(f"{name} has no value")
        try:
            found = PARSERS[flag.parse](text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise InputError(f"{name} {text}: {error}") from error
        pairs = found.items() if isinstance(found, dict) else [("", found)]
        for key, value in pairs:
            field = flag.inside.get(key) if key else flag.sets
            if field is None:
                self.ignored.append(f"{name} {key}={value}")
                continue
            meant = in_our_words(field, value)
            if meant != value:
                self.read_as.append(f"{name} {value!s} as {field} {meant}")
            self._set(field, meant)

    def _set(self, field: str, value: Any) -> None:
        if field == "features":
            self.settings["features"] = self.settings.get("features", frozenset()) | {value}
        elif field == "old_interleave":  # the older name wins where it says more than 1
            if value > 1:
                self.settings["interleave"] = value
        else:
            self.settings[field] = value


def _is_flag(word: str) -> bool:
    """A word that begins another flag, and is no negative number."""
    return word.startswith("-") and not re.fullmatch(r"-\d[\d.]*", word)


def _json_object(text: str) -> dict[str, Any]:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _drafts_of_verified(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise ValueError("the token itself is one of them, so at least 1")
    return number - 1


PARSERS: dict[str, Callable[[str], Any]] = {
    "size": whole_number,
    "share": positive_number,
    "text": str,
    "json": _json_object,
    "verified": _drafts_of_verified,
}
