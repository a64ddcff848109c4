"""The sheet that every picture is drawn on: title above, caption with the sources below, same bytes for same values."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpkit.errors import ConfigError, InputError

if TYPE_CHECKING:  # matplotlib is an extra, imported where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""The Okabe-Ito palette, told apart by every eye; up to eight things."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
"""What tells lines apart where colour does not."""

SHARES = "cividis_r"
"""Colours of shares, light to dark; as good in grey."""

LIGHTEST = 0.22
"""Where on it the least share is: what lies before can hardly be told from white paper."""

BUDGET, GREY, PALE = "#D55E00", "#777777", "#E8E8E8"
PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""Behind words that lie on grid lines, as their bbox."""

FORMATS = ("png", "svg")
DPI = 150
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": True,  # on paper of its own, which no grid line crosses
    "legend.framealpha": 0.9,
    "legend.edgecolor": "white",
    "legend.fancybox": False,
    "svg.hashsalt": "cpkit",  # ids of clip paths and markers are made from it, else from chance
}


def check_picture(path: str) -> None:
    """Refuse a file that cannot become a picture, before the work; raises InputError, or ConfigError for the extra."""
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise InputError(f"{path}: a picture's name ends in .png or .svg")
    try:
        import matplotlib  # noqa: F401  # asked whether it is there
    except ImportError as error:
        raise ConfigError(
            f"pictures are drawn by matplotlib ({error}): pip install -c constraints.txt '.[plot]' in cpkit's checkout"
        ) from error


@contextmanager
def sheet(path: str | Path, title: str, caption: Sequence[str], *, width: float, height: float) -> Iterator["Figure"]:
    """A figure to draw on, saved to path at the end; width, height: inches; caption: sentences, wrapped to fit."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**matplotlib.rcParamsDefault, **STYLE}  # whatever the reader's own settings are
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(textwrap.fill(title, int(width * 9)), x=0.012, ha="left", fontsize=13, fontweight="bold")
        yield figure
        text = "\n".join(line for sentence in caption for line in textwrap.wrap(sentence, int(width * 15)))
        figure.supxlabel(text, x=0.012, ha="left", fontsize=8, color="#444444")
        suffix = Path(path).suffix.lower()
        blank: dict[str, Any] = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=DPI, format=suffix[1:], metadata=blank)


def short(number: float) -> str:
    """A number in three figures.  950 -> 950, 1234 -> 1.23k, 999999 -> 1M, 2.5e13 -> 25T"""
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"


def tokens_text(number: int) -> str:
    """Tokens as contexts are spoken of, in powers of two where they are such.  131072 -> 128K, 1000 -> 1,000"""
    for scale, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if number and number % scale == 0:
            return f"{number // scale:,}{letter}"
    return f"{number:,}"


def shorten_axis(axis: Any) -> None:
    """Tick labels like 20k and 5M."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def wait_axis(axis: Any) -> None:
    """A logarithmic axis of seconds, labelled at 1, 2 and 5 of each decade."""
    one_two_five(axis)
    seconds_axis(axis)


def one_two_five(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 of each decade; its labels are another's."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_formatter(NullFormatter())


def share_colours() -> "Colormap":
    """Colours of shares without those that are lost on white."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap([colormaps[SHARES](LIGHTEST + (1 - LIGHTEST) * i / 255) for i in range(256)], "shares")


def seconds_axis(axis: Any) -> None:
    """Tick labels like 20 ms, 1.5 s and 2,000 s."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: wait_text(value)))


def wait_text(seconds: float) -> str:
    """Seconds in three figures, or all those of a whole number.  0.0123 -> 12.3 ms, 1.5 -> 1.5 s, 2000 -> 2,000 s"""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def token_axis(axes: "Axes", values: Sequence[int]) -> None:
    """A logarithmic x axis of token counts with a tick at each value, as many as have room."""
    axes.set_xscale("log", base=2)
    kept = values[:: -(-len(values) // 12)] if values else values
    axes.set_xticks(kept, [tokens_text(value) for value in kept])
    axes.minorticks_off()


def rank_ticks(num_ranks: int) -> list[int]:
    """Ranks to label on an axis: all of up to 16, else about eight at steps of a power of two, and the last."""
    if num_ranks <= 16:
        return list(range(num_ranks))
    step = 1 << max((num_ranks // 8).bit_length() - 1, 0)
    ticks = list(range(0, num_ranks, step))
    if num_ranks - 1 - ticks[-1] < step // 2:
        ticks.pop()
    return [*ticks, num_ranks - 1]
