"""Names of models as engines, folders and people have them, and which commands take them: all."""

import json

import pytest

from cpkit.cli.main import main
from cpkit.cli.model_names import ending_bits, known_model, named_model
from cpkit.model import load_config, published_fields


@pytest.mark.parametrize(
    ("name", "known", "bits"),
    [
        ("deepseek-v3.2", "deepseek-v3.2", None),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2", None),
        ("zai-org/GLM-5.3-Flash", "glm-5.3-flash", None),
        ("zai-org/GLM-5.3-FP8", "glm-5.3", 8),
        ("/models/GLM-5.2-NVFP4/", "glm-5.2", 4),
        ("GLM-5-AWQ", "glm-5", 4),
        ("DeepSeek-V3.2-Exp-BF16", "deepseek-v3.2", 16),
        ("zai-org/GLM-5-Air", "zai-org/GLM-5-Air", None),
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3", None),
    ],
)
def test_model_names(name, known, bits):
    assert known_model(name) == named_model(name) == known
    assert ending_bits(name) == bits


def test_a_path_that_is_there_is_what_it_holds(tmp_path, monkeypatch, capsys):
    """As downloaded models lie, under the names that they are served by."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "GLM-5.2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**published_fields(*load_config("glm-5.2")), "index_topk": 1024}))
    for name in ("GLM-5.2", "./GLM-5.2/"):
        assert named_model(name) == name
        assert main(["doctor", "--model", name, "-tp", "8"]) == 0
        assert "read as" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["plan --seq-lens 9 --query-lens 1", "draw work --seq-lens 9 --query-lens 1 -o x.svg"]
)
def test_every_command_takes_the_names_that_engines_take(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), "--model", "deepseek-ai/DeepSeek-V3.2"]) == 0
    assert not capsys.readouterr().err


def test_simulate_stores_weights_as_the_name_ends(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,70,3\n")
    flags = ["simulate", str(path), "-tp", "8", "--cost", "b200", "--processes", "1", "--json", "-"]
    spent = {}
    for name in ("glm-5.2", "nvidia/GLM-5.2-NVFP4", "GLM-5.2-BF16"):
        assert main([*flags, "--model", name]) == 0
        spent[name] = json.loads(capsys.readouterr().out)["cost"]["stages"]["experts"]
    assert spent["nvidia/GLM-5.2-NVFP4"] < spent["glm-5.2"] < spent["GLM-5.2-BF16"]
