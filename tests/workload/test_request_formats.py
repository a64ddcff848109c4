"""What one-request-a-line formats mean: units, block sizes, chats."""

import json

import pytest

from cpkit.workload import read_trace


def write(tmp_path, *rows):
    path = tmp_path / "trace"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_mooncake_counts_in_milliseconds_and_512_tokens(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 513, "output_length": 0, "hash_ids": [10**15, 7]},
        {"timestamp": 27_000, "input_length": 512, "output_length": 5, "hash_ids": [10**15]},
    ]
    first, second = read_trace(write(tmp_path, *rows)).requests
    assert (first.arrival_s, second.arrival_s) == (0.0, 27.0)
    assert first.hash_block_size == 512
    assert first.block_hashes[0] == second.block_hashes[0] != first.block_hashes[1]
    assert first.output_len == 0
    assert first.session is first.depends_on is None


def test_chats_count_in_seconds_and_16_tokens_and_wait_for_their_parent(tmp_path):
    def chat(chat_id, parent, second, turn):
        return {
            "chat_id": chat_id, "parent_chat_id": parent, "timestamp": second, "input_length": 40,
            "output_length": 5, "type": "text", "turn": turn, "hash_ids": [1, 2, 3],
        }  # fmt: skip

    rows = [chat(17, -1, 1.5, 1), chat(20, 17, 9.0, 2), chat(21, 999, 9.5, 2), chat(22, 20, 9.5, 3)]
    requests = read_trace(write(tmp_path, *rows)).requests
    assert [r.arrival_s for r in requests] == [1.5, 9.0, 9.5, 9.5]
    assert [r.depends_on for r in requests] == [None, 0, None, 1]
    assert [r.session for r in requests] == ["17", "17", "21", "17"]
    assert {r.hash_block_size for r in requests} == {16}


@pytest.mark.parametrize(
    ("lens", "hashes", "size"), [([1000, 70], [16, 2], 64), ([1000], [2], 512), ([100, 99], [2, 1], 50)]
)
def test_other_block_sizes_are_found(tmp_path, lens, hashes, size):
    rows = [
        {"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": list(range(k))}
        for n, k in zip(lens, hashes, strict=True)
    ]
    assert {r.hash_block_size for r in read_trace(write(tmp_path, *rows)).requests} == {size}


def test_rows_without_hashes_share_nothing(tmp_path):
    row = {"timestamp": 0, "input_length": 1000, "output_length": 1}
    (only,) = read_trace(write(tmp_path, row)).requests
    assert len(only.block_hashes) == 0


@pytest.mark.parametrize("zone", ["", "+00:00"], ids=["2023", "2024"])
def test_azure_wall_clock_counts_from_the_first_row(tmp_path, zone):
    path = tmp_path / "trace"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        f"2023-11-16 23:59:59.5000000{zone},4808,10\n2023-11-17 00:00:01.0000000{zone},3,0\n"
    )
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in read_trace(path).requests] == [
        (0.0, 4808, 10),
        (1.5, 3, 0),
    ]
