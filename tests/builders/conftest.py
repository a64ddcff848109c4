"""These tests need torch: without it none of them is collected. Each runs once for each backend of the kernels.

Random worlds run by torch alone: Triton's interpreter takes minutes for them. test_backends.py compares the two.
"""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


def pytest_generate_tests(metafunc):
    from hypothesis import is_hypothesis_test

    if "default_backend" in metafunc.fixturenames:
        once = is_hypothesis_test(metafunc.function) or "backends" in metafunc.module.__name__
        backends = ["torch"] if once else ["torch", "triton"]
        metafunc.parametrize("default_backend", backends, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def default_backend(request):
    """The backend of builders that are made without naming one."""
    from cpkit.builders import indexer, kpool, swa

    def choose(named, device):
        return request.param if named is None else named

    with pytest.MonkeyPatch.context() as patch:
        for module in (indexer, kpool, swa):
            patch.setattr(module, "choose_backend", choose)
        yield
