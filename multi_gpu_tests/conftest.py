"""One NCCL job for all tests; everything is skipped, with the reason, where it cannot run."""

import pytest

torch = pytest.importorskip("torch", reason="multi-GPU tests need torch: pip install 'cpkit[torch]'")

from cpkit.comm.launcher import detect  # noqa: E402 - torch comes first


def missing():
    """Why these tests cannot run here, or None."""
    launch = detect()
    if launch.kind not in ("torchrun", "slurm") or launch.world_size < 2:
        return "needs ranks: torchrun --nproc-per-node 2 -m pytest multi_gpu_tests"
    if torch.cuda.device_count() <= launch.local_rank:
        return f"rank {launch.rank} needs a GPU of its own: torch sees {torch.cuda.device_count()} on this machine"
    if not torch.distributed.is_nccl_available():
        return "this torch was built without NCCL"
    return None


def pytest_collection_modifyitems(items):
    if reason := missing():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def job():
    """Number of ranks of the job, and this rank."""
    from cpkit.comm.torch_dist import close_job, open_job

    launch = detect()
    open_job(launch, torch.device("cuda", launch.local_rank), 60)
    yield launch
    close_job()
