"""Output files are refused before the work, and nothing that is there is touched by asking."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpkit.cli.main import main
from cpkit.cli.output import check_outputs, check_writable
from cpkit.cli.progress import StatusLine
from cpkit.errors import InputError


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,1\n")
    return path


def test_asking_changes_nothing(tmp_path):
    there = tmp_path / "there"
    there.write_text("kept")
    os.utime(there, (5, 5))
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (there, tmp_path / "new", link, pipe, "/dev/null"):  # a pipe that nobody reads would be waited for
        check_writable(str(path))
    done = subprocess.run(
        [sys.executable, "-c", "from cpkit.cli.output import check_writable; check_writable('/dev/stdout')"],
        stdout=subprocess.PIPE,
    )
    assert done.returncode == 0, "stdout by its name, where it is a pipe without one"
    assert there.read_text() == "kept" and there.stat().st_mtime == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "there"] and link.is_symlink()


def test_asking_leaves_alone_what_another_process_begins_meanwhile(tmp_path, monkeypatch):
    path, looked = tmp_path / "results", Path.exists

    def exists(place):
        answer = looked(place)
        if place == path:
            place.write_text("theirs")
        return answer

    monkeypatch.setattr(Path, "exists", exists)
    check_writable(str(path))
    assert path.read_text() == "theirs"


@pytest.mark.parametrize("flag", ["--html", "--timeline", "--json"])
@pytest.mark.parametrize(
    ("path", "told"),
    [
        pytest.param("/proc/new", "/proc/new: ", id="unwritable"),
        pytest.param("nowhere/new", "there is no folder nowhere", id="no-folder"),
        pytest.param(".", ".: a folder, where", id="folder"),
        pytest.param("", "the name of an output file is empty", id="no-name"),
        pytest.param("trace.csv", "would write over what is read", id="the-trace-itself"),
        pytest.param("x" * 300, "File name too long", id="long-name"),
    ],
)
def test_simulate_refuses_a_file_before_it_replays(trace, tmp_path, monkeypatch, capsys, flag, path, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cpkit.simulate.loop.simulate", lambda *args, **options: pytest.fail("replayed"))
    before = trace.read_bytes()
    assert main(["simulate", "trace.csv", "--cost", "h200", flag, path]) == 2
    out, err = capsys.readouterr()
    assert not out and told in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [trace] and trace.read_bytes() == before


@pytest.mark.parametrize("flag", ["--html", "--json"])
def test_a_full_disk_loses_no_report(trace, capsys, flag):
    assert main(["simulate", str(trace), "--processes", "1", flag, "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert "1 of 1 step checked" in out and "No space left" in err and err.count("\n") == 1


def test_only_json_is_printed(trace):
    check_outputs(str(trace), json="-", html=None)
    for name in ("html", "timeline", "results"):
        with pytest.raises(InputError, match=f"--{name} -: only --json can be printed"):
            check_outputs(str(trace), **{name: "-"})


@pytest.mark.parametrize(
    ("columns", "shown"), [(12, "0123456789a"), (200, "0123456789abcdef"), (0, "0123456789abcdef")]
)
def test_a_status_line_never_wraps(monkeypatch, capsys, columns, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda file: os.terminal_size((columns, 24)))
    StatusLine().show(lambda: "0123456789abcdef")
    assert capsys.readouterr().err == f"\r{shown}\033[K"
