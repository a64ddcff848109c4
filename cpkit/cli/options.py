"""Flags that describe a deployment, as engines spell them, and what they mean to the planner.

`-tp 8 -pcp 2 -dcp 8 --block-size 64`, pasted from an engine's launch line, works as it is.
"""

import argparse
import shlex
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cpkit.budget import ACCEPTANCE_RATE, WORKSPACE_MODEL_LENS, Budget
from cpkit.cli.model_names import named_model
from cpkit.cli.parser import chance, positive_number, whole_number
from cpkit.errors import ConfigError, InputError
from cpkit.model import MODELS, Model, load_model
from cpkit.topology import Topology

if TYPE_CHECKING:  # settings need numpy, which --help does without
    from cpkit.batch import Batch
    from cpkit.settings import StepSettings

PARTITIONS = ("head-tail", "head-tail-even", "round-robin", "contiguous")
MERGES = ("ag_rs", "a2a")
"""The planner's STRATEGIES and MERGES again, whose modules need numpy."""

DEFAULTS: dict[str, Any] = {field.name: field.default for noun in (Topology, Budget) for field in fields(noun)}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the shared flags, in three groups."""
    world = parser.add_argument_group("world")
    add_model(world)
    sizes = {
        "-tp": ("--tensor-parallel-size", "ranks that split heads"),
        "-pcp": ("--prefill-context-parallel-size", "ranks that split the query tokens of prefills"),
        "-dcp": (
            "--decode-context-parallel-size",
            "ranks that split stored keys, of those there are: a divisor of tp, or with pcp > 1 one of 1, pcp, tp*pcp",
        ),
        "-pp": ("--pipeline-parallel-size", "pipeline stages"),
        "-dp": ("--data-parallel-size", "replicas"),
    }
    for short, (long, meaning) in sizes.items():
        world.add_argument(
            short, long, dest=short[1:], type=whole_number, default=1, metavar="N", help=f"{meaning} (default: 1)"
        )
    _number(world, "--cp-kv-cache-interleave-size", "consecutive tokens kept on one DCP rank", field="interleave")
    _number(world, "--block-size", "tokens of a KV block on one rank", field="block_size")
    choices = parser.add_argument_group("choices")
    choices.add_argument(
        "--partition",
        choices=PARTITIONS,
        default=PARTITIONS[0],
        help="how PCP ranks split a prefill (default: %(default)s)",
    )
    choices.add_argument(
        "--dcp-comm-backend",
        choices=MERGES,
        default=MERGES[0],
        help="how DCP ranks merge partial outputs (default: %(default)s)",
    )
    choices.add_argument(
        "--shard-decode-requests",
        action=argparse.BooleanOptionalAction,
        help="deal decodes out over PCP ranks instead of replicating them (default: only with pcp > 1 and dcp = 1)",
    )
    limits = parser.add_argument_group("limits of a step")
    _number(limits, "--max-num-batched-tokens", "query tokens of a step", field="max_num_batched_tokens")
    _number(limits, "--max-num-seqs", "requests of a step", field="max_num_seqs")
    add_num_drafts(limits)
    limits.add_argument(
        "--max-model-len", type=whole_number, metavar="N", help="longest request in tokens (default: the model's)"
    )
    limits.add_argument(
        "--workspace-tokens",
        type=whole_number,
        metavar="N",
        help=f"tokens whose keys one prefill chunk may gather (default: {WORKSPACE_MODEL_LENS} x max model length)",
    )
    limits.add_argument(
        "--logits-mb",
        type=positive_number,
        default=DEFAULTS["logits_bytes"] / (1 << 20),
        metavar="MIB",
        help="MiB of fp32 indexer logits written at once (default: %(default)g)",
    )


def add_model(group: argparse._ActionsContainer) -> None:
    """Add --model."""
    group.add_argument(
        "--model",
        default="deepseek-v3.2",
        help=f"one of {', '.join(MODELS)}, or the path of a config.json (default: %(default)s)",
    )


def add_num_drafts(group: argparse._ActionsContainer) -> None:
    """Add --num-speculative-tokens."""
    drafts = "draft tokens that a decode verifies beside its own"
    _number(group, "--num-speculative-tokens", drafts, field="num_speculative_tokens")


def add_acceptance_rate(group: argparse._ActionsContainer) -> None:
    """Add --acceptance-rate, for replays."""
    group.add_argument(
        "--acceptance-rate",
        type=chance,
        default=ACCEPTANCE_RATE,
        metavar="P",
        help="chance that a draft token is kept after those before it (default: %(default)s)",
    )


def _number(group: argparse._ActionsContainer, flag: str, meaning: str, *, field: str) -> None:
    """A flag for a whole number, with the default of the noun's field."""
    text = f"{meaning} (default: {DEFAULTS[field]:,})"
    group.add_argument(flag, dest=field, type=whole_number, default=DEFAULTS[field], metavar="N", help=text)


def read_settings(args: argparse.Namespace, reduce: Callable[[Model], Model] = lambda model: model) -> "StepSettings":
    """The settings that the flags describe; reduce: what is planned of the model. Raises ConfigError or InputError."""
    from cpkit.settings import StepSettings

    model = reduce(load_model(named_model(args.model)))
    workspace = args.workspace_tokens
    if workspace is None:
        workspace = WORKSPACE_MODEL_LENS * max_model_len(args, model)
    topology = Topology(
        dp=args.dp,
        pp=args.pp,
        pcp=args.pcp,
        tp=args.tp,
        dcp=args.dcp,
        interleave=args.interleave,
        block_size=args.block_size,
    )
    model.check(topology)
    budget = Budget(
        workspace_tokens=workspace,
        logits_bytes=int(args.logits_mb * (1 << 20)),
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        num_speculative_tokens=args.num_speculative_tokens,
    )
    partition = args.partition.replace("-", "_")
    return StepSettings(topology, model, budget, partition, args.dcp_comm_backend, args.shard_decode_requests)


def max_model_len(args: argparse.Namespace, model: Model) -> int:
    """Longest request in tokens: the flag's, else the model's; raises ConfigError."""
    length: int = model.max_model_len if args.max_model_len is None else args.max_model_len
    if not 1 <= length <= 1 << 40:
        raise ConfigError(f"--max-model-len {length}: it is a whole number from 1 to 2^40")
    return length


def check_model_len(batch: "Batch", max_model_len: int | None) -> None:
    """Refuse a request beyond a length that was asked for; the model's own limit is left to the engine."""
    for req, seq_len in enumerate(batch.seq_lens.tolist()):
        if max_model_len is not None and seq_len > max_model_len:
            raise InputError(f"request {req}: seq_len={seq_len} is above --max-model-len {max_model_len}")


def engine_flags(args: argparse.Namespace, settings: "StepSettings") -> str:
    """The flags of `cpkit plan` that give these settings again, ready to paste; read_settings undoes it."""
    topology, budget = settings.topology, settings.budget
    flags = ["--model", args.model]
    for axis in ("tp", "pcp", "dcp", "pp", "dp"):
        if getattr(topology, axis) > 1:
            flags += [f"-{axis}", getattr(topology, axis)]
    flags += ["--cp-kv-cache-interleave-size", topology.interleave, "--block-size", topology.block_size]
    flags += ["--partition", args.partition, "--dcp-comm-backend", settings.merge]
    if settings.shard_decode_requests is not None:
        flags += [f"--{'' if settings.shard_decode_requests else 'no-'}shard-decode-requests"]
    flags += ["--max-num-batched-tokens", budget.max_num_batched_tokens, "--max-num-seqs", budget.max_num_seqs]
    flags += ["--num-speculative-tokens", budget.num_speculative_tokens]
    flags += ["--workspace-tokens", budget.workspace_tokens, "--logits-mb", repr(args.logits_mb)]
    return shlex.join(str(flag) for flag in flags)
