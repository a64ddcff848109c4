"""The recorder in this process and in programs that know nothing of it."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cpkit.cli.main import main
from cpkit.consistency import mark_step, record
from cpkit.consistency.log_file import WINDOW_BYTES, LogFile
from cpkit.consistency.operations import METHODS, Method
from cpkit.consistency.record_log import read_log
from cpkit.consistency.recorder import _recording
from cpkit.errors import ConfigError, InputError

PROGRAM = Path(__file__).with_name("program.py")
LINES = PROGRAM.read_text().splitlines()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A world of one rank, in this process."""
    meet = tmp_path_factory.mktemp("world") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def lines_of(folder):
    [path] = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def calls_of(folder):
    return [line for line in lines_of(folder) if "op" in line]


def test_every_kind_of_call_is_logged(alone, tmp_path):
    x, two = torch.ones(4), torch.ones(2, 3, dtype=torch.float64)
    with record(tmp_path) as folder:
        dist.all_reduce(x)
        mark_step(7)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(two, 0)
        dist.reduce(x, 0)
        dist.all_gather([x.clone()], x)
        dist.all_gather_into_tensor(x.clone(), x)
        dist.gather(x, [x.clone()], 0)
        dist.scatter(x, [x.clone()], 0)
        dist.reduce_scatter_tensor(x.clone(), x)
        dist.all_to_all_single(x.clone(), x)
        dist.all_to_all_single(x.clone(), x, [4], [4])
        dist.barrier()
        dist.all_gather_object([None], {"any": 1})
        with dist._coalescing_manager():
            dist.all_reduce(x)
            dist.all_reduce(two.float())
    dist.all_reduce(x)
    calls = calls_of(folder)
    assert [call["op"] for call in calls] == [
        *("all_reduce", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather"),
        *("scatter", "reduce_scatter_tensor", "all_to_all_single", "all_to_all_single", "barrier"),
        *("all_gather", "all_gather", "all_reduce_coalesced"),
    ]
    assert [call["seq"] for call in calls] == list(range(1, 16))
    assert [call["step"] for call in calls] == [0] + [7] * 14
    assert (calls[2]["dtypes"], calls[2]["shapes"], calls[2]["root"]) == (["float64"], [[2, 3]], 0)
    assert calls[-1]["shapes"] == [[4], [2, 3]]
    assert ["uneven" in call for call in calls[9:11]] == [False, True]
    here = f"consistency/{Path(__file__).name}:"
    assert all(call["site"].startswith(here) for call in calls)
    at = [int(call["site"].split(" < ")[0].removeprefix(here)) for call in calls]
    assert at == sorted(at) and len(set(at)) == 14  # two of the object collective
    assert lines_of(folder)[-1] == {"end": 1}


def test_torch_is_as_before_when_nothing_is_recorded(alone, tmp_path):
    before = {name: getattr(dist.ProcessGroup, name, None) for name in METHODS}
    with record(tmp_path):
        assert dist.ProcessGroup.allreduce is not before["allreduce"]
    assert {name: getattr(dist.ProcessGroup, name, None) for name in METHODS} == before
    dist.all_reduce(torch.ones(1))


def test_threads_share_a_log_without_tearing_it(alone, tmp_path):
    def work():
        for _ in range(200):
            dist.all_reduce(torch.ones(1))

    with record(tmp_path) as folder:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [call["seq"] for call in calls_of(folder)] == list(range(1, 801))


def test_a_rank_without_calls_has_a_log(alone, tmp_path):
    with record(tmp_path) as folder:
        pass
    history, remarks = read_log(next(folder.glob("*.jsonl")))
    assert (history.rank, history.world, history.calls, history.ended, remarks) == (0, 1, {}, True, [])


def test_a_second_recorder_is_refused(alone, tmp_path):
    with record(tmp_path), pytest.raises(ConfigError, match="records into"), record(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file"), record(tmp_path / "file" / "logs"):
        pass


def test_a_recorder_that_breaks_stops_and_says_so(alone, tmp_path, capsys, monkeypatch):
    with record(tmp_path):
        dist.all_reduce(torch.ones(1))
        monkeypatch.setattr(LogFile, "write", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    said = capsys.readouterr().err
    assert said.count("cpkit record: stopped") == 1 and "disk is full" in said


@pytest.mark.parametrize("size", [1, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1, 3 * WINDOW_BYTES])
def test_lines_over_the_edge_of_a_window(tmp_path, size):
    log = LogFile(tmp_path / "log")
    lines = [b"a" * 7, b"b" * size, b"c"]
    for line in lines:
        log.write(line)
    assert (tmp_path / "log").read_bytes().rstrip(b"\0") == b"".join(lines)  # there before any close
    log.close()
    assert (tmp_path / "log").read_bytes() == b"".join(lines)


def test_a_call_costs_microseconds(alone, tmp_path):
    """CPU time of this thread, the best of several; the bound is loose since test machines are busy."""
    recording = _recording(lambda *_: None, Method("all_reduce"))
    arguments = dist.group.WORLD, [torch.ones(4)], dist.AllreduceOptions()
    costs = []
    with record(tmp_path):
        for _ in range(5):
            start = time.thread_time()
            for _ in range(1000):
                recording(*arguments)
            costs.append((time.thread_time() - start) * 1e3)
    assert min(costs) < 20


def number_of(words):
    return 1 + next(i for i, line in enumerate(LINES) if words in line)


@pytest.mark.slow
def test_a_program_that_knows_nothing_is_told_the_line_that_one_rank_skipped(recorded, capsys):
    assert main(["check", str(recorded / "logs"), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    [first, *_] = next(run for run in data["runs"] if run["run"].endswith("/skip"))["divergences"]
    assert (first["kind"], first["odd"], first["ranks"], first["call"]) == ("missing call", [1], [0, 1], 3)
    assert first["entered"][0]["site"].split(" < ")[0] == f"consistency/program.py:{number_of('rank 1 skips')}"
    assert data["bad"] == [] and len(data["runs"]) == 3


@pytest.mark.slow
def test_a_killed_rank_leaves_its_log_and_is_waited_for(recorded, capsys):
    assert main(["check", str(recorded / "logs")]) == 1
    text = capsys.readouterr().out
    barrier = number_of("dist.barrier")
    for words in (
        "/killed: ranks 0, 1, 13 calls compared",
        "/whole: ranks 0, 1, 13 calls compared",
        "rank 1 never came; rank 0 entered it",
        f"rank 0: barrier at consistency/program.py:{barrier}",
        "rank 1: all_reduce float32 [4] at consistency/program.py",
        "with no end of the process in its log",
    ):
        assert words in text, text


@pytest.mark.slow
def test_the_hook_hands_on_to_the_one_that_it_hides(recorded):
    said = (recorded / "stderr").read_text()
    assert "own hook" in said and "logs go to" in said
    assert "cpkit record: stopped" not in said and "not recorded" not in said
