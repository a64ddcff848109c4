"""`cpkit plan`: which batches it takes, what it prints, and that flags mean what engines mean by them."""

import json

import pytest

from cpkit.batch import Batch
from cpkit.cli.main import main
from cpkit.cli.options import MERGES, PARTITIONS
from cpkit.planner import collectives, partition

WORLD = ["-tp", "2", "-pcp", "2", "-dcp", "4"]


def plan_json(capsys, *argv):
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *argv):
    assert main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("cpkit plan: error: ")
    return err


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--seq-lens", "10,9", "--query-lens", "1,7"], id="seq-query"),
        pytest.param(["--seq-lens", "10,9", "--computed-lens", "9,2"], id="seq-computed"),
        pytest.param(["--query-lens", "1,7", "--computed-lens", "9,2"], id="query-computed"),
        pytest.param(["--seq-lens", "10,9", "--query-lens", "1,7", "--computed-lens", "9,2"], id="all-three-agree"),
    ],
)
def test_two_of_three_lengths(capsys, argv):
    batch = plan_json(capsys, *argv)["batch"]
    assert (batch["seq_lens"], batch["query_lens"]) == ([10, 9], [1, 7])


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        pytest.param(
            ["--seq-lens", "10", "--query-lens", "1", "--max-model-len", "9"],
            "above --max-model-len 9",
            id="longer-than-the-model",
        ),
        pytest.param([], "no step to plan", id="nothing"),
        pytest.param(["--seq-lens", "10"], "no step to plan", id="one-of-three"),
        pytest.param(["--seq-lens", "10", "--query-lens", "1,7"], "--seq-lens has 1, --query-lens has 2", id="counts"),
        pytest.param(
            ["--seq-lens", "10,9", "--query-lens", "1,7", "--computed-lens", "9,3"],
            "request 1: seq_len=9 is not computed_len=3 + query_len=7",
            id="contradiction",
        ),
        pytest.param(["--seq-lens", "2", "--computed-lens", "3"], "seq_len=2 < computed_len=3", id="negative-query"),
        pytest.param(["--query-lens", "2", "--computed-lens=-1"], "request 0 has -1", id="negative-computed"),
        pytest.param(["--seq-lens", "3", "--query-lens", "7"], "seq_len=3 < query_len=7", id="query-above-seq"),
        pytest.param(["--seq-lens", "9" * 30, "--query-lens", "1"], "64 bits", id="huge"),
        pytest.param(["--seq-lens", str(1 << 41), "--query-lens", "1"], "2^40", id="above-2-to-40"),
        pytest.param(["--seq-lens", "9000", "--query-lens", "9000"], "max_num_batched_tokens=8192", id="over-budget"),
        pytest.param(["--seq-lens", "9", "--query-lens", "9", "--rank", "7"], "rank 7", id="no-such-rank"),
        pytest.param(["--seq-lens", "9", "--query-lens", "9", "--model", "gpt"], "unknown model 'gpt'", id="model"),
        pytest.param(["b.json", "--seq-lens", "9"], "a batch file or lengths, not both", id="file-and-lengths"),
        pytest.param(["--seq-lens", "9,x", "--query-lens", "1,1"], "'x' is not a whole number", id="not-a-number"),
        pytest.param(["--seq-lens", "9", "--query-lens", "9", "--logits-mb", "nan"], "above 0", id="nan"),
    ],
)
def test_refusals(capsys, argv, reason):
    assert reason in refusal(capsys, *argv)


def test_a_third_length_that_hides_behind_the_sum(capsys):
    """Totals agree, requests do not."""
    argv = ["--seq-lens", "10,10", "--query-lens", "4,6", "--computed-lens", "4,6"]
    assert "request 0: seq_len=10 is not computed_len=4 + query_len=4" in refusal(capsys, *argv)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param("{", "b.json: ", id="truncated"),
        pytest.param('{"seq_lens": [1], "query_lens": [NaN]}', "nan", id="nan"),
        pytest.param('{"seq_lens": [1e400], "query_lens": [1]}', "inf", id="huge"),
        pytest.param('{"seq_lens": [3], "query_lens": [7]}', "seq_len=3 < query_len=7", id="query-above-seq"),
    ],
)
def test_bad_batch_files_name_the_file(capsys, tmp_path, monkeypatch, content, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.json").write_text(content)
    error = refusal(capsys, "b.json")
    assert "b.json" in error and reason in error


def test_flags_of_an_engine(capsys):
    """Both spellings of every flag, pasted, give the same world."""
    short = ["-tp", "2", "-pcp", "2", "-dcp", "4", "-pp", "3", "-dp", "5"]
    long = ["--tensor-parallel-size=2", "--prefill-context-parallel-size=2", "--decode-context-parallel-size=4"]
    long += ["--pipeline-parallel-size", "3", "--data-parallel-size", "5"]
    rest = ["--cp-kv-cache-interleave-size", "16", "--block-size", "128", "--dcp-comm-backend", "a2a"]
    rest += ["--max-num-batched-tokens", "16K", "--max-num-seqs", "8", "--num-speculative-tokens", "3"]
    plans = [plan_json(capsys, "--seq-lens", "9", "--query-lens", "9", *world, *rest) for world in (short, long)]
    assert plans[0] == plans[1]
    topology = {"dp": 5, "pp": 3, "pcp": 2, "tp": 2, "dcp": 4, "interleave": 16, "block_size": 128}
    assert plans[0]["topology"] == topology and plans[0]["merge"] == "a2a"
    budget = plans[0]["budget"]
    assert (budget["max_num_batched_tokens"], budget["max_num_seqs"]) == (16384, 8)
    assert (budget["num_speculative_tokens"], budget["logits_bytes"]) == (3, 512 << 20)
    assert budget["workspace_tokens"] == 40 * 163840


def test_max_model_len_sets_the_workspace(capsys):
    plan = plan_json(capsys, "--seq-lens", "9", "--query-lens", "9", "--max-model-len", "1000")
    assert plan["budget"]["workspace_tokens"] == 40_000


def test_choices_are_the_planners():
    assert {name.replace("-", "_") for name in PARTITIONS} == set(partition.STRATEGIES)
    assert MERGES == collectives.MERGES


@pytest.mark.parametrize("name", ["head-tail", "head-tail-even", "round-robin", "contiguous"])
def test_every_partition(capsys, name):
    plan = plan_json(capsys, *WORLD, "--seq-lens", "64", "--query-lens", "64", "--partition", name)
    assert plan["partition"] == name.replace("-", "_") and plan["pcp_tokens"] == [32, 32]


def test_json_and_rank(capsys):
    """7 tokens as A B G | C D E F, the decode on both; rank 2 is pcp rank 1."""
    argv = [*WORLD, "--seq-lens", "10,9", "--query-lens", "1,7"]
    whole, one = plan_json(capsys, *argv), plan_json(capsys, *argv, "--rank", "2")
    assert [rank["rank"] for rank in whole["ranks"]] == [0, 1, 2, 3]
    assert one["ranks"] == [whole["ranks"][2]] and one["digests"] == whole["digests"]
    rows = one["ranks"][0]["rows"]
    assert (rows["req"], rows["start_pos"], rows["num_tokens"]) == ([0, 1, 1], [9, 4, 6], [1, 2, 2])
    assert one["ranks"][0]["dcp_rank"] == 1 and one["ranks"][0]["stored_keys"] == {"1": [3, 2]}


def test_report_of_a_small_step(capsys):
    assert main(["plan", *WORLD, "--seq-lens", "10,9", "--query-lens", "1,7"]) == 0
    out = capsys.readouterr().out
    for strip in (".........*", "0123012301", "..0011110", "012301230"):
        assert strip in out
    assert "0[9:10)* 1[2:4) 1[8:9)" in out and "reduce_scatter  dcp" in out


def test_report_of_one_rank_shows_that_rank_alone(capsys):
    assert main(["plan", *WORLD, "--seq-lens", "10,9", "--query-lens", "1,7", "--rank", "3"]) == 0
    out = capsys.readouterr().out
    assert "Rank 3: tp rank 1, pcp rank 1, dcp rank 3" in out and "dcp group  0 2 1 3" in out
    assert "Who computes" not in out and "[4:6)" in out and "[2:4)" not in out


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--seq-lens", "", "--query-lens", ""], id="no-requests"),
        pytest.param(["--seq-lens", "5,5", "--query-lens", "0,0"], id="no-tokens"),
        pytest.param([*WORLD, "--seq-lens", "3", "--query-lens", "3", "--rank", "3"], id="shorter-than-the-ranks"),
        pytest.param(["-pcp", "2", "--seq-lens", "3", "--query-lens", "1", "--rank", "1"], id="idle-rank"),
        pytest.param(["--seq-lens", str(1 << 24), "--query-lens", "1"], id="16M-context"),
        pytest.param(
            ["--seq-lens", ",".join([str(1 << 30)] * 5), "--query-lens", "1,1,1,1,1"], id="total-above-2-to-31"
        ),
    ],
)
def test_steps_on_the_edge_are_reported(capsys, argv):
    assert main(["plan", *argv]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Step ")
    assert "Who computes" in out or "Its rows" in out


def test_256_ranks_fit_a_page(capsys):
    argv = ["-tp", "8", "-pcp", "32", "-dcp", "256", "--block-size", "256", "--max-num-batched-tokens", "1m"]
    assert main(["plan", *argv, "--seq-lens", "1m", "--query-lens", "1m"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 70 and max(map(len, lines)) <= 125
    assert any("more" in line for line in lines)


def test_a_saved_batch_plans_like_its_lengths(capsys, tmp_path):
    path = tmp_path / "step.json"
    Batch.from_lens([10, 9], [1, 7], req_ids=[4, 7]).save(path)
    saved = plan_json(capsys, *WORLD, str(path))
    typed = plan_json(capsys, *WORLD, "--seq-lens", "10,9", "--query-lens", "1,7")
    assert saved["ranks"] == typed["ranks"] and saved["batch"]["req_ids"] == [4, 7]
