"""A model whose weights are counted too: the flags that commands share, and what they mean."""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cpkit.cli.model_names import ending_bits, named_model
from cpkit.cli.options import add_model
from cpkit.cli.parser import positive_number, whole_number
from cpkit.model import Model, load_config, load_model, published_fields

if TYPE_CHECKING:  # numpy is not needed for --help
    from cpkit.sizing.figures import Figure
    from cpkit.sizing.weights import ModelWeights

GIB = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class SizedModel:
    """A model, its config, and what the flags say of its weights and its longest request.

    name: shipped, or a path. config: its published fields. weight_bits: as asked for, or as the name that was given
    ends; None: the config's. max_model_len: in tokens.
    """

    name: str
    model: Model
    config: dict[str, Any]
    weight_bits: int | None
    max_model_len: int

    def weights(self) -> "ModelWeights":
        """The weights counted; raises ConfigError."""
        from cpkit.sizing.weights import load_weights

        return load_weights(self.name, self.model, weight_bits=self.weight_bits)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add --model and --weight-bits."""
    add_model(parser)
    add_weight_bits(parser)


def add_weight_bits(parser: argparse._ActionsContainer) -> None:
    """Add --weight-bits."""
    parser.add_argument(
        "--weight-bits",
        type=whole_number,
        metavar="N",
        help="bits of a weight: 16, 8 or 4 (default: the name's or the config's, or 8)",
    )


def add_weights_gib(parser: argparse._ActionsContainer, default: str = "estimated") -> None:
    """Add --weights-gib; default: what it is without."""
    parser.add_argument(
        "--weights-gib",
        type=positive_number,
        metavar="GIB",
        help=f"GiB of weights on each rank (default: {default})",
    )


def given_weights(args: argparse.Namespace) -> "Figure | None":
    """Bytes of one rank's weights where --weights-gib says them."""
    from cpkit.sizing.figures import Figure

    return None if args.weights_gib is None else Figure(args.weights_gib * GIB, "given", "--weights-gib")


def add_longest(parser: argparse.ArgumentParser) -> None:
    """Add --max-model-len, where it decides what fits."""
    parser.add_argument(
        "--max-model-len", type=whole_number, metavar="N", help="longest request (default: the model's)"
    )


def add_overlap(parser: argparse._ActionsContainer, belongs_to: str = "") -> None:
    """Add --overlap, an assumption of the cost model; belongs_to: the flag that it needs, like `--cost: `."""
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        metavar="SHARE",
        help=f"{belongs_to}share of the collectives that runs behind computation (default: 0)",
    )


def read_sized_model(args: argparse.Namespace) -> SizedModel:
    """The model that the flags name; raises ConfigError or InputError."""
    name = named_model(args.model)
    model = load_model(name)
    asked = getattr(args, "max_model_len", None)  # a command without the flag plans no longer request than the model's
    return SizedModel(
        name=name,
        model=model,
        config=published_fields(*load_config(name)),
        weight_bits=ending_bits(args.model) if args.weight_bits is None else args.weight_bits,
        max_model_len=model.max_model_len if asked is None else asked,
    )
