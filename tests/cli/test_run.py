"""`cpkit run`: the steps it takes, its report and its exit codes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cpkit.batch import Batch
from cpkit.cli.main import main
from cpkit.cli.run import FIRST_TELLS_S
from cpkit.errors import PlanError
from cpkit.worker import program

TRACE = Path(__file__).parents[2] / "examples" / "data" / "conversation_excerpt.jsonl.gz"
SMALL = ["--heads", "8", "--verify", "all"]
PROMPTS = ["--prompt-lens", "20,3", "--decode-steps", "1"]


def run_json(capsys, *argv):
    code = main(["run", *argv, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def refusal(capsys, *argv):
    assert main(["run", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("cpkit run: error: ")
    return err


def test_report_names_what_was_run_verified_and_sent(capsys):
    assert main(["run", *PROMPTS, *SMALL, "-tp", "2", "-pcp", "2", "-dcp", "4", "--dcp-comm-backend", "a2a"]) == 0
    text = capsys.readouterr().out
    for words in (
        "deepseek-v3.2, dsa, 8 heads: ranks are threads of one process, on cpu",
        "tp=2 pcp=2 dcp=4: 4 ranks; interleave 1, block 64, partition head-tail, merge a2a",
        "2 steps of prompts: 25 query tokens",
        "all: no mismatch",
        "hidden rows                100, to the bit",
        "all_to_all over dcp: partials",
        "planned = counted",
    ):
        assert words in text, words


def test_json_counts_and_digests(capsys):
    code, data = run_json(capsys, *PROMPTS, *SMALL, "-tp", "2", "-dcp", "2")
    assert code == 0 and data["format"] == "cpkit-run-1"
    assert (data["steps"], data["tokens"], data["findings"]["hidden_rows"]) == (2, 25, 50)
    # every token on both ranks; keys: all of 20 and of 3 prompt tokens, then 21 and 4
    assert data["findings"]["rows"] == 50
    assert data["findings"]["keys"] == 2 * (sum(range(1, 21)) + 6 + 21 + 4)
    sent = data["ranks"][0]["calls"]
    assert len(sent) == 4 and sent.keys() == data["ranks"][0]["bytes"].keys()
    assert sent["all_gather over dcp: candidates"] == 2  # of the one chunk of both prompts, then of their decodes
    again = run_json(capsys, *PROMPTS, *SMALL, "-pcp", "2")[1]
    assert again["findings"]["keys"] == data["findings"]["keys"] // 2


@pytest.mark.parametrize(
    ("argv", "kind", "layers"),
    [
        pytest.param(["--model", "glm-5.2"], "dsa", ["dsa", "dsa"], id="shared-selection"),
        pytest.param(["--model", "deepseek-v4-flash"], "c4a", ["c4a"], id="first-kind"),
        pytest.param(["--model", "deepseek-v4-flash", "--layer", "swa"], "swa", ["swa"], id="named"),
    ],
)
def test_layers(capsys, argv, kind, layers):
    code, data = run_json(capsys, *argv, *PROMPTS, *SMALL, "--data", "random")
    assert (code, data["layers"]) == (0, layers)


def test_batch_file(capsys, tmp_path):
    Batch.from_lens([10, 9], [1, 7]).save(tmp_path / "step.json")
    code, data = run_json(capsys, str(tmp_path / "step.json"), *SMALL, "-pcp", "2")
    assert (code, data["steps"], data["tokens"]) == (0, 1, 8)


def test_batch_beyond_the_length_asked_for_is_refused(capsys, tmp_path):
    path = tmp_path / "batch.json"
    path.write_text('{"seq_lens": [4, 9], "query_lens": [1, 1]}')
    assert "request 1: seq_len=9 is above --max-model-len 8" in refusal(capsys, str(path), "--max-model-len", "8")
    assert main(["run", str(path), *SMALL, "--max-model-len", "9"]) == 0


def test_blocks_beyond_this_machines_memory_are_refused(capsys, tmp_path):
    path = tmp_path / "batch.json"
    path.write_text('{"seq_lens": [100], "query_lens": [1], "block_tables": [[1, 2000000000]]}')
    assert f"{path}: a pool of 2,000,000,001 KV blocks" in refusal(capsys, str(path))
    assert "--prompt-lens: a pool of 1,562,500,002 KV blocks" in refusal(capsys, "--prompt-lens", "99999999999")


def test_first_steps_of_a_trace(capsys):
    argv = ["--trace", str(TRACE), "--steps", "2", "--max-num-batched-tokens", "64", "--heads", "8"]
    code, data = run_json(capsys, *argv, "-tp", "2", "-dcp", "2")
    assert (code, data["steps"], data["findings"]["num_mismatches"]) == (0, 2, 0)


def test_mismatch_exits_with_1_and_tells_the_first(capsys, monkeypatch):
    right = program.gather_hidden
    monkeypatch.setattr(program, "gather_hidden", lambda *args: right(*args).flip(0))
    code = main(["run", *PROMPTS, *SMALL])
    out, err = capsys.readouterr()
    assert code == 1 and "DIFFER from the oracle" in out
    assert err.startswith(
        "cpkit run: mismatch in step 0, layer 1 (hidden rows), request 0, token 0, rank 0: hidden row"
    )


def test_rank_that_raises_is_named(capsys, monkeypatch):
    def fail(guard, step, plan):
        if plan.ranks[0].rank == 3:
            raise ValueError("planted")

    monkeypatch.setattr("cpkit.run.execute.StepGuard.check", fail)
    assert main(["run", *PROMPTS, *SMALL, "-tp", "2", "-pcp", "2"]) == 1
    assert capsys.readouterr().err.startswith("cpkit run: error: rank 3 raised ValueError: planted\n")


def test_rank_that_refuses_its_step_is_named(capsys, monkeypatch):
    def refuse(guard, step, plan):
        if plan.ranks[0].rank == 2:
            raise PlanError("planted: pages of rank 2 alone")

    monkeypatch.setattr("cpkit.run.execute.StepGuard.check", refuse)
    assert main(["run", *PROMPTS, *SMALL, "-tp", "2", "-pcp", "2"]) == 2
    assert capsys.readouterr().err == ("cpkit run: error: rank 2 raised PlanError: planted: pages of rank 2 alone\n")


def test_backend_that_ran_is_told(capsys):
    assert run_json(capsys, *PROMPTS, *SMALL)[1]["backend"] == "torch"
    assert main(["run", *PROMPTS, *SMALL]) == 0
    assert "metadata and indexer: torch; attention and merge: torch" in capsys.readouterr().out
    assert main(["run", *PROMPTS, *SMALL, "--backend", "triton"]) == 2
    assert "rank 0 raised ConfigError: backend='triton' with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param([], "give one of a batch file, --prompt-lens and --trace", id="nothing"),
        pytest.param([*PROMPTS, "--trace", "x"], "give one of", id="two"),
        pytest.param(["--prompt-lens", "5,0"], "at least one token", id="empty-prompt"),
        pytest.param(["--trace", "x", "--decode-steps", "3"], "--decode-steps follows the prompts", id="decode-steps"),
        pytest.param([*PROMPTS, "--steps", "3"], "--steps 3: at least 1, of a --trace", id="steps"),
        pytest.param([*PROMPTS, "--num-kv-blocks", "9"], "--num-kv-blocks 9: the pool of a --trace", id="pool"),
        pytest.param([*PROMPTS, "--seed", "-1"], "--seed -1: it is not negative", id="seed"),
        pytest.param([*PROMPTS, "--max-model-len", "21"], "are 22, above --max-model-len 21", id="long-prompt"),
        pytest.param([*PROMPTS, "--layer", "c4a"], "deepseek-v3.2 has no c4a", id="layer"),
        pytest.param([*PROMPTS, "--heads", "3", "-tp", "2"], "tp=2 must divide them", id="heads"),
        pytest.param(
            [*PROMPTS, "--heads", "8", "-tp", "4", "-pcp", "4", "-dcp", "4"],
            "error: deepseek-v3.2: 2 heads cannot be scattered over dcp=4",
            id="merged-heads",
        ),
        pytest.param([*PROMPTS, "--comm", "torch"], "comm torch needs ranks, and nobody started them", id="torch"),
        pytest.param([*PROMPTS, "--comm", "mpi"], "mpirun -n N python -m ...", id="mpi"),
        pytest.param([*PROMPTS, "-dp", "2"], "dp=2 pp=1: a run executes one layer of one replica", id="replicas"),
        pytest.param([*PROMPTS, "--json", "no/such/report.json"], "there is no folder", id="json"),
        pytest.param([*PROMPTS, "--model", "deepseek-v4.1-flash"], "swa with rows of [(512, 528)]", id="row-format"),
    ],
)
def test_refusals(capsys, argv, words):
    assert words in refusal(capsys, *argv)


def test_device_without_gpu_is_refused(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "torch sees no GPU here" in refusal(capsys, *PROMPTS, "--device", "cuda")


def test_missing_torch_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("cpkit.comm.connect.find_spec", lambda name: None)
    assert "pip install -c constraints.txt '.[torch]'" in refusal(capsys, *PROMPTS)


def test_refused_ranks_leave_the_word_to_the_first_of_their_machine_for_a_while(capsys, monkeypatch):
    """A launcher ends the others with it; a rank that alone is refused, as none else has its arguments, then tells."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    launch = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for rank, local_rank, who, pauses in ((0, 0, "", 0), (1, 1, "rank 1: ", 1), (2, 0, "rank 2: ", 0)):
        for name, value in {**launch, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}.items():
            monkeypatch.setenv(name, value)
        waited.clear()
        assert main(["run", *PROMPTS, "-tp", "2"]) == 2
        told = "torchrun started 3 ranks, but dp=1 * pp=1 * pcp=1 * tp=2 makes 2"
        assert capsys.readouterr().err.startswith(f"cpkit run: error: {who}{told}")
        assert waited == [FIRST_TELLS_S] * pauses


def test_help_needs_no_numpy():
    code = (
        "import sys; sys.modules['numpy'] = sys.modules['torch'] = None; from cpkit.cli.main import main; "
        "sys.exit(main(['run', '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--prompt-lens" in done.stdout, done.stderr


def test_activations_of_a_file_are_those_of_its_requests(capsys, tmp_path):
    """What the generator makes of one request, written to a file: the same selections and outputs."""
    torch = pytest.importorskip("torch")
    from cpkit.activations.generate import Generated

    req, position = torch.zeros(7, dtype=torch.int64), torch.arange(7)
    make, tokens = Generated(0), (req, position)
    arrays = {
        f"{stream}.0.0": make.heads(stream, 0, *tokens, dim, range(8)).float().numpy()
        for stream, dim in (("query", 576), ("index_query", 128))
    }
    rows = {"index_weights": 8, "index_key": 128, "latent": 576, "hidden": 7168}
    arrays |= {f"{stream}.0.0": make.rows(stream, 0, *tokens, dim).float().numpy() for stream, dim in rows.items()}
    np.savez(tmp_path / "values.npz", **arrays)
    argv = ["--prompt-lens", "6", "--decode-steps", "1", *SMALL, "-pcp", "2", "-dcp", "2"]
    code, data = run_json(capsys, *argv, "--activations", str(tmp_path / "values.npz"))
    generated = run_json(capsys, *argv)[1]
    assert code == 0 and data["data"].endswith("values.npz")
    for name in ("selections", "outputs"):
        assert [rank[name] for rank in data["ranks"]] == [rank[name] for rank in generated["ranks"]]


def test_activations_of_a_file_name_no_shared_tokens(capsys, tmp_path):
    Batch.from_lens([70, 70], [6, 6], block_tables=[[1, 2], [1, 3]]).save(tmp_path / "step.json")
    np.savez(tmp_path / "values.npz", **{"latent.0.0": np.zeros((1, 4))})
    values = ["--activations", str(tmp_path / "values.npz")]
    assert "requests share blocks [1]" in refusal(capsys, str(tmp_path / "step.json"), *values)
    assert "requests of a trace share prefixes" in refusal(capsys, "--trace", str(TRACE), *values)
    assert "no array" in refusal(capsys, *PROMPTS, *values)
