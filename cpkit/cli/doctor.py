"""`cpkit doctor`: does an engine take this deployment, why not, what is near, and how much fits."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpkit.cli.exit_codes import VIOLATED
from cpkit.cli.launch_flags import in_our_words
from cpkit.cli.launch_line import LaunchLine, read_launch_line
from cpkit.cli.model_names import ending_bits, named_model
from cpkit.cli.output import emit, write_json
from cpkit.cli.parser import positive_number, whole_number
from cpkit.cli.sized_model import add_weights_gib, given_weights
from cpkit.errors import InputError
from cpkit.model import MODELS, load_config, load_model, published_fields
from cpkit.sizing.deployment import ENGINES

if TYPE_CHECKING:  # memory needs numpy, which --help does without
    from cpkit.sizing.deployment import Deployment
    from cpkit.sizing.memory.deployment import Limits

DESCRIPTION = """\
Say whether an engine takes a deployment: yes or no, every rule that refuses it with its source, and the nearest legal
settings. With --chip also how many tokens and requests fit. Settings are flags, or an engine's launch line behind --.
"""

EPILOG = """\
examples:
  why does vLLM refuse DeepSeek-V3.2 with tp 8 and dcp 8, and what is near:
    cpkit doctor --model deepseek-v3.2 --engine vllm -tp 8 -dcp 8 --chip h200

  how much fits, and what each knob buys:
    cpkit doctor --model deepseek-v3.2 --engine cpkit -tp 8 -dcp 8 --chip h200 --memory

  a launch line as it is, and the same with another dcp:
    cpkit doctor --chip h200 -- vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 -pcp 2 -dcp 4
    cpkit doctor --chip h200 -dcp 16 -- vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 -pcp 2 -dcp 4
    cpkit doctor --chip b200 -- python -m sglang.launch_server --model-path zai-org/GLM-5.2 --tp 8 --dcp-size 8

Sizes are counted as the engine counts them: for sglang -tp is the whole group and -pcp its attn-cp-size. Every rule
and every number says where it comes from; docs/doctor.md lists the rules.
exit codes: 0 yes, 1 no, 2 bad usage
"""

LIMITS = ("max_model_len", "utilization", "max_num_batched_tokens", "max_num_seqs", "num_speculative_tokens")
BUDGET = ("max_num_batched_tokens", "max_num_seqs", "num_speculative_tokens", "logits_bytes")
REQUEST_LENGTH = 32_768


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `doctor` to the parser."""
    parser = commands.add_parser(
        "doctor", help="does an engine take this deployment, and what fits", description=DESCRIPTION, epilog=EPILOG
    )
    parser.set_defaults(run=run)
    parser.add_argument("line", nargs="*", metavar="-- LINE", help="an engine's launch line, behind --")
    parser.add_argument("--model", help=f"one of {', '.join(MODELS)}, or the path of a config.json")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="whose rules (default: cpkit)")
    parser.add_argument("--chip", help="accelerator, like h200 or b200: rules of chips, and memory")
    _add_world(parser)
    _add_choices(parser)
    _add_sglang(parser)
    _add_memory(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON and nothing else")


def _add_world(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("world (default: 1)")
    sizes = {
        "tp": ("--tensor-parallel-size", "ranks that split heads"),
        "pcp": ("--prefill-context-parallel-size", "ranks that split query tokens"),
        "dcp": ("--decode-context-parallel-size", "ranks that split stored keys"),
        "pp": ("--pipeline-parallel-size", "pipeline stages"),
        "dp": ("--data-parallel-size", "replicas"),
    }
    for name, (long, meaning) in sizes.items():
        group.add_argument(f"-{name}", long, dest=name, type=whole_number, metavar="N", help=meaning)


def _add_choices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("choices (default: the engine's, told under Assumed)")
    numbers = {
        "--cp-kv-cache-interleave-size": ("interleave", "consecutive tokens on one DCP rank (default: 1)"),
        "--block-size": ("block_size", "tokens of a KV block on one rank"),
        "--draft-modules": ("draft_modules", "modules of an MTP draft (default: 1)"),
        "--remote-dcp": ("remote_dcp", "dcp of the other side of a KV transfer"),
        "--kv-heads": ("kv_heads", "KV heads, of a GQA variant of the model (default: one latent head)"),
        "--replay-window": ("replay_window", "tokens of bounded window replay (default: none)"),
    }
    for flag, (field, meaning) in numbers.items():
        group.add_argument(flag, dest=field, type=whole_number, metavar="N", help=meaning)
    words = {
        "--attention-backend": ("attention_backend", "like flashmla-sparse"),
        "--kv-cache-dtype": ("kv_cache_dtype", "fp8_ds_mla, fp8_e4m3, bf16, nvfp4_ds_mla, .."),
        "--dcp-comm-backend": ("merge", "how partial outputs are merged: ag_rs, a2a"),
        "--cudagraph-mode": ("graphs", "none, piecewise, full_decode_only, full, full_and_piecewise"),
        "--speculation": ("speculation", "mtp, dspark, eagle, ngram, draft-model, medusa, suffix"),
        "--kv-transfer": ("kv_transfer", "nixl, mooncake, or another, of which no rule is known"),
        "--kv-role": ("kv_role", "producer, consumer or both"),
    }
    for flag, (field, meaning) in words.items():
        group.add_argument(flag, dest=field, metavar="NAME", help=meaning)
    group.add_argument(
        "--no-prefix-caching", dest="prefix_caching", action="store_const", const=False, help="(default: on)"
    )
    group.add_argument(
        "--with", dest="features", action="append", metavar="FEATURE", help="like lora; docs/doctor.md lists them"
    )


def _add_sglang(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sglang alone")
    group.add_argument("--cp-strategy", choices=("zigzag", "interleave"), help="how prefill CP splits tokens")
    group.add_argument("--attn-dp", type=whole_number, metavar="N", help="data-parallel attention inside tp")
    group.add_argument("--moe-dp", type=whole_number, metavar="N", help="data-parallel MoE inside tp")
    group.add_argument("--moe-a2a", metavar="NAME", help="MoE exchange backend")
    group.add_argument("--kv-saving", choices=("layer-split", "kv-sharding"), help="how prefill CP saves KV")
    group.add_argument("--disaggregation", choices=("prefill", "decode"), help="half of a disaggregated pair")
    group.add_argument("--eagle-topk", type=whole_number, metavar="N", help="branches of an EAGLE draft")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory (with --chip)")
    group.add_argument("--memory", action="store_true", help="list caches, buffers and what each knob buys")
    group.add_argument(
        "--request-length",
        type=whole_number,
        metavar="N",
        help=f"tokens of the requests that are counted (default: {REQUEST_LENGTH}, or the longest request)",
    )
    add_weights_gib(group)
    group.add_argument(
        "--weight-bits",
        type=whole_number,
        metavar="N",
        help="for the estimate: 16, 8 or 4 (default: the name's or the config's, or 8)",
    )
    group.add_argument(
        "--gpu-memory-utilization", dest="utilization", type=positive_number, metavar="SHARE", help="(default: 0.9)"
    )
    limits = {
        "--max-model-len": ("max_model_len", "longest request in tokens (default: the model's)"),
        "--max-num-batched-tokens": ("max_num_batched_tokens", "query tokens of a step (default: 8192)"),
        "--max-num-seqs": ("max_num_seqs", "requests of a step (default: 256)"),
        "--num-speculative-tokens": ("num_speculative_tokens", "draft tokens of a decode (default: 0)"),
        "--workspace-tokens": ("workspace_tokens", "tokens whose keys a prefill chunk may gather"),
    }
    for flag, (field, meaning) in limits.items():
        group.add_argument(flag, dest=field, type=whole_number, metavar="N", help=meaning)
    group.add_argument("--logits-mb", type=positive_number, metavar="MIB", help="indexer logits at once (default: 512)")


def run(args: argparse.Namespace) -> int:
    """Judge and print; returns 0 for yes, VIOLATED for no."""
    from cpkit.report.doctor_report import doctor_report
    from cpkit.sizing.memory.deployment import knobs
    from cpkit.sizing.verdict import judge, verdict_data

    line = read_launch_line(args.line) if args.line else None
    deployment, limits, told = read_deployment(args, line)
    if args.memory and deployment.chip is None:
        raise InputError("--memory needs a chip: give --chip")
    length = min(REQUEST_LENGTH, limits.max_model_len) if args.request_length is None else args.request_length
    if not 1 <= length <= limits.max_model_len:
        raise InputError(f"--request-length {length}: from 1 to the longest request, {limits.max_model_len} tokens")
    verdict = judge(deployment, limits, told)
    if args.json:
        ignored = list(line.ignored) if line else []
        write_json("-", {**verdict_data(verdict, length), "ignored": ignored})
    else:
        choices = knobs(deployment, limits) if args.memory and verdict.memory else ()
        text = doctor_report(verdict, length, choices, detail=args.memory)
        emit("\n".join([text, *([f"Ignored   {', '.join(line.ignored)}"] if line and line.ignored else [])]))
    return 0 if verdict.works else VIOLATED


def read_deployment(
    args: argparse.Namespace, line: LaunchLine | None
) -> tuple["Deployment", "Limits", tuple[str, ...]]:
    """What flags and line describe, and what was assumed; flags win over the line."""
    from cpkit.sizing.chips import chip
    from cpkit.sizing.deployment import Deployment
    from cpkit.sizing.rules.defaults import complete

    settings = dict(line.settings) if line else {}
    names = [*Deployment.__dataclass_fields__, *LIMITS]
    given = {name: getattr(args, name, None) for name in names if name not in ("engine", "model", "chip")}
    if given["features"] is not None:
        given["features"] = frozenset(given["features"]) | settings.get("features", frozenset())
    settings |= {name: in_our_words(name, value) for name, value in given.items() if value is not None}
    if line and args.engine not in (None, line.engine):
        raise InputError(f"--engine {args.engine}, but the line starts {line.engine}: leave --engine out")
    written = args.model or (line.model if line else None)
    if written is None:
        raise InputError("no model: give --model, or a launch line behind --")
    name = named_model(written)
    told = [f"model {written} read as {name}"] if name != written else []
    told += [f"{text} (launch line)" for text in (line.read_as if line else ())]
    bits = args.weight_bits
    if bits is None and args.weights_gib is None and (bits := ending_bits(written)) is not None:
        told.append(f"weights of {bits} bits, as the name {written} ends; --weight-bits says otherwise")
    model = load_model(name)
    limits = replace(
        _limits(args, settings, published_fields(*load_config(name)), model.max_model_len), weight_bits=bits
    )
    engine = line.engine if line else args.engine or "cpkit"
    accelerator = chip(args.chip) if args.chip else None
    deployment, assumed = complete(engine, model, accelerator, settings)
    return deployment, limits, (*told, *assumed)


def _limits(args: argparse.Namespace, settings: dict[str, Any], config: dict[str, Any], max_model_len: int) -> "Limits":
    """What decides memory; takes its settings out of `settings`."""
    from cpkit.sizing.figures import Figure
    from cpkit.sizing.memory.deployment import DEFAULT_UTILIZATION, Limits

    found = {name: settings.pop(name) for name in LIMITS if name in settings}
    if args.logits_mb is not None:
        found["logits_bytes"] = int(args.logits_mb * (1 << 20))
    share = found.get("utilization")
    return Limits(
        config=config,
        max_model_len=found.get("max_model_len", max_model_len),
        weights=given_weights(args),
        utilization=DEFAULT_UTILIZATION if share is None else Figure(share, "given", "a flag"),
        workspace_tokens=args.workspace_tokens,
        budget={name: found[name] for name in BUDGET if name in found},
    )
