"""`cpkit doctor` as a shell sees it: the answer, its exit code, what it lists."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cpkit
from cpkit.cli.main import main
from cpkit.model import load_config, published_fields

V32 = "--model deepseek-v3.2"


def doctor(capsys, text):
    code = main(["doctor", *shlex.split(text)])
    out, err = capsys.readouterr()
    return code, out, err


def test_no_with_every_rule_its_source_and_what_is_near(capsys):
    code, out, err = doctor(capsys, f"{V32} --engine vllm -tp 8 -dcp 8 --chip h200")
    assert (code, err) == (1, "")
    assert out.startswith("No: deepseek-v3.2, vllm 0.33.0, tp=8 dcp=8 on 8 GPUs (h200)\n    1 of ")
    assert "vllm-flashmla-padding" in out
    assert "the 128 heads that score a shard pad to 128, a rank's own 16 to 64" in out
    assert "source:  vllm 0.33.0, backends/mla/flashmla_sparse.py; derived, not run" in out
    near = out.partition("Nearest legal settings")[2].splitlines()
    assert near[2].split()[:2] == ["1.0", "8"] and near[2].endswith("dcp 8 -> 4")
    assert "Memory of one rank" not in out


def test_the_page_shows_what_is_printed(capsys):
    page = (Path(cpkit.__file__).parents[1] / "docs" / "doctor.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"```\w*\n(.*?)\n```", page, re.DOTALL)[:2]
    _, out, _ = doctor(capsys, command.removeprefix("cpkit doctor "))
    assert out.startswith(f"{shown}\n\nAssumed")


def test_every_rule_that_refuses_is_listed(capsys):
    code, out, _ = doctor(capsys, f"{V32} --engine vllm -tp 8 -pcp 2 -dcp 4 --with lora")
    assert code == 1 and "3 of " in out
    assert all(rule in out for rule in ("vllm-dcp-pcp", "vllm-pcp-lora", "vllm-flashmla-padding"))


def test_yes_with_what_fits(capsys):
    code, out, err = doctor(capsys, f"{V32} --engine vllm -tp 8 -dcp 4 --chip h200 --weights-gib 80")
    assert (code, err) == (0, "") and out.startswith("Yes: ")
    assert "none of " in out and "80.0 GiB  given: --weights-gib" in out
    assert "12,017 B" in out and "hardware file: " in out and "Assumed   attention-backend flashmla-sparse" in out
    assert "What each knob buys" not in out


def test_memory_in_full(capsys):
    code, out, _ = doctor(capsys, f"{V32} --engine vllm -tp 8 -dcp 4 --chip h200 --memory --request-length 64K")
    assert code == 0
    for title in ("Caches of one rank", "Buffers of one rank", "What each knob buys (requests of 65,536 tokens"):
        assert title in out
    knobs = {tuple(line.split()[:2]): line for line in out.partition("What each knob buys")[2].splitlines()}
    assert "refused: vllm-flashmla-padding" in knobs["dcp", "8"]
    assert "not what vllm does" in knobs["index", "cache"]
    assert "2 x the GPUs" in knobs["pcp", "2"]
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        pytest.param(
            "-- vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 -pcp 2 -dcp 4 --port 80",
            1,
            ["vllm-dcp-pcp", "model deepseek-ai/DeepSeek-V3.2 read as deepseek-v3.2", "Ignored   --port 80"],
            id="vllm",
        ),
        pytest.param(
            "-dcp 2 -- vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 -pcp 2 -dcp 4",
            0,
            ["tp=8 pcp=2 dcp=2 on 16 GPUs"],
            id="a-flag-wins-over-the-line",
        ),
        pytest.param(
            "--chip h200 -- python -m sglang.launch_server --model-path zai-org/GLM-5.2 --tp 8 --dcp-size 8",
            1,
            ["sglang-dcp-backend", "sglang 0.5.23"],
            id="sglang-on-hopper",
        ),
        pytest.param(
            "--chip b200 -- python -m sglang.launch_server --model-path zai-org/GLM-5.2 --tp 8 --dcp-size 8",
            0,
            ["indexer keys replicated", "8,388 B"],
            id="sglang-on-blackwell",
        ),
    ],
)
def test_launch_lines(capsys, text, code, expected):
    found, out, err = doctor(capsys, text)
    assert (found, err) == (code, "")
    assert all(words in out for words in expected)


def test_no_room_is_a_no(capsys):
    code, out, _ = doctor(capsys, f"{V32} -tp 2 --chip h200")
    assert code == 1 and out.startswith("No: ") and "but memory does:" in out and "no room for KV on h200" in out


def test_what_the_planner_does_not_take_may_still_be_legal(capsys):
    code, out, _ = doctor(capsys, "--model deepseek-v4-flash --engine vllm --block-size 64 --chip h200 -tp 8")
    assert (
        code == 0
        and "memory is not counted" in out
        and "block_size=64 is not a multiple of 128" in " ".join(out.split())
    )
    code, out, _ = doctor(capsys, "--model deepseek-v4-flash --engine vllm --block-size 64 --chip h200 -tp 8 --memory")
    assert code == 0 and "What each knob buys" not in out


@pytest.mark.parametrize(
    ("flags", "told", "source"),
    [
        pytest.param("", True, "4-bit experts, 8-bit weights beside them", id="the-name's"),
        pytest.param("--weight-bits 8", False, "8-bit weights", id="a-flag's"),
        pytest.param("--weights-gib 60", False, "--weights-gib", id="stated"),
    ],
)
def test_the_ending_of_a_name_is_what_weights_are_stored_in(capsys, flags, told, source):
    _, out, _ = doctor(capsys, f"--model nvidia/GLM-5.2-NVFP4 -tp 8 -dcp 8 --chip b200 {flags} --json")
    data = json.loads(out)
    words = "weights of 4 bits, as the name nvidia/GLM-5.2-NVFP4 ends; --weight-bits says otherwise"
    assert (words in data["assumed"]) == told
    assert source in data["memory"]["weights"]["source"]


def test_weights_stored_in_another_way_are_asked_for(capsys, tmp_path):
    config = published_fields(*load_config("deepseek-v3.2")) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = doctor(capsys, f"--model {tmp_path} -tp 8 -dcp 8 --chip h200")
    assert "memory is not counted" in out and "quantization by 'awq'" in " ".join(out.split())
    _, out, _ = doctor(capsys, f"--model {tmp_path} -tp 8 -dcp 8 --chip h200 --weight-bits 4")
    assert "memory is not counted" not in out


def test_json_holds_what_the_text_says(capsys):
    code, out, _ = doctor(capsys, f"{V32} --engine vllm -tp 8 -dcp 8 --chip h200 --json")
    data = json.loads(out)
    assert code == 1 and data["works"] is False and data["memory"] is None and data["ignored"] == []
    assert [refusal["id"] for refusal in data["refusals"]] == ["vllm-flashmla-padding"]
    assert data["nearest"][0]["changes"] == [{"setting": "dcp", "asked": 8, "here": 4}]
    assert data["nearest"][0]["tokens"] > data["nearest"][2]["tokens"]
    code, out, _ = doctor(capsys, f"{V32} -tp 8 -dcp 8 --chip h200 --json")
    data = json.loads(out)
    assert code == 0 and data["memory"]["token_bytes"] == 61 * 788 / 8
    assert data["memory"]["weights"]["kind"] == "assumed" and data["memory"]["requests"] > 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("", "no model: give --model, or a launch line behind --", id="no-model"),
        pytest.param("--model gpt", "unknown model 'gpt': use one of", id="model"),
        pytest.param(f"{V32} --chip a100", "unknown chip 'a100': use one of", id="chip"),
        pytest.param(f"{V32} --chip h200 --weight-bits 5", "weights of 5 bits: 16, 8 or 4", id="weight-bits"),
        pytest.param(f"{V32} --engine trt", "invalid choice: 'trt'", id="engine"),
        pytest.param(f"{V32} -tp 0", "tp=0: every size is a whole number from 1", id="size"),
        pytest.param(f"{V32} --memory", "--memory needs a chip", id="memory-of-no-chip"),
        pytest.param(f"{V32} --with x", "unknown feature 'x'", id="feature"),
        pytest.param(f"{V32} --cudagraph-mode all", "graphs='all': use one of", id="graphs"),
        pytest.param(f"{V32} --speculation mpt", "speculation='mpt': use one of mtp, dspark, eagle", id="speculation"),
        pytest.param(
            "-- vllm serve deepseek-ai/DeepSeek-V3.2 --speculative-config.method magic",
            "speculation='magic': use one of mtp",
            id="speculation-of-a-line",
        ),
        pytest.param(f"{V32} --kv-cache-dtype int3", "kv_cache_dtype='int3': use one of fp8_ds_mla", id="cache-dtype"),
        pytest.param(
            "--model deepseek-v4-flash --kv-cache-dtype nvfp4_ds_mla", "rows are known for dsa alone", id="nvfp4-of-v4"
        ),
        pytest.param(f"{V32} --max-num-seqs 0", "max_num_seqs=0: it is a whole number from 1", id="no-requests"),
        pytest.param(f"{V32} --workspace-tokens 0", "workspace_tokens=0: it is a whole number", id="no-workspace"),
        pytest.param(f"{V32} --max-model-len 0", "max_model_len=0: it is a whole number from 1", id="no-context"),
        pytest.param(
            f"{V32} --gpu-memory-utilization 1.01", "utilization 1.01: a share of the memory", id="more-than-all"
        ),
        pytest.param(f"{V32} --request-length 1M", "from 1 to the longest request, 163840 tokens", id="request-length"),
        pytest.param("--engine vllm -- sglang serve --model glm-5", "the line starts sglang", id="two-engines"),
        pytest.param("-- ls", "ls starts no engine", id="no-launch-line"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(capsys, text, reason):
    code, out, err = doctor(capsys, text)
    assert (code, out) == (2, "") and err.count("\n") == 1 and reason in err


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        pytest.param("--help", ["torch", "numpy"], id="help"),
        pytest.param(f"{V32} -tp 8 -dcp 8 --chip h200 --memory", ["torch"], id="memory"),
    ],
)
def test_heavy_modules_stay_out(text, modules):
    program = (
        "import sys; from cpkit.cli.main import main; code = main(sys.argv[1:]); "
        f"print(sorted(set({modules}) & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    argv = [sys.executable, "-c", program, "doctor", *shlex.split(text)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_help_teaches(capsys):
    code, out, _ = doctor(capsys, "--help")
    assert (
        code == 0 and "vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 -pcp 2 -dcp 4" in out and "exit codes: 0 yes" in out
    )
