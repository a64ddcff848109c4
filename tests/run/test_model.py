"""What is run of a model."""

import pytest

from cpkit.errors import ConfigError
from cpkit.model import load_model
from cpkit.run.model import run_model


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [
        ("deepseek-v3.2", None, [("dsa", True)]),
        ("glm-5.2", "dsa", [("dsa", True), ("dsa", False)]),
        ("deepseek-v4-flash", None, [("c4a", True)]),
        ("deepseek-v4-flash", "c128a", [("c128a", False)]),
        ("deepseek-v4.1-flash", None, [("swa", False)]),
    ],
)
def test_layers_of_a_kind(name, kind, layers):
    model = run_model(load_model(name), kind, None)
    assert [(layer.kind, layer.runs_index) for layer in model.layers] == layers
    assert model.num_heads == load_model(name).num_heads


@pytest.mark.parametrize(("num_heads", "index_heads"), [(1, 1), (16, 16), (64, 64), (100, 64)])
def test_fewer_heads(num_heads, index_heads):
    model = run_model(load_model("deepseek-v3.2"), None, num_heads)
    assert (model.num_heads, model.layers[0].index.num_heads) == (num_heads, index_heads)


def test_refusals():
    with pytest.raises(ConfigError, match=r"deepseek-v3.2 has no swa: it has dsa"):
        run_model(load_model("deepseek-v3.2"), "swa", None)
    with pytest.raises(ConfigError, match="0 heads"):
        run_model(load_model("deepseek-v3.2"), None, 0)


def test_names_that_modules_without_torch_repeat():
    """The command line offers them without loading torch; what runs has the last word."""
    pytest.importorskip("torch")
    from cpkit.cli.run import COMMS
    from cpkit.comm.connect import KINDS as COMM_KINDS
    from cpkit.layers import RUN_KINDS
    from cpkit.worker.caches import KINDS as CACHE_KINDS

    assert set(RUN_KINDS) == set(CACHE_KINDS)
    assert COMMS == COMM_KINDS
