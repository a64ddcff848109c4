"""Which heads a rank has the LSE of: the ranks of a TP place share its heads out over PCP."""

import pytest

from cpkit.topology import Topology
from cpkit.worker.heads import own_merged_heads


@pytest.mark.parametrize(
    ("world", "heads"),
    [
        pytest.param({"tp": 2, "dcp": 2}, [range(4)] * 2, id="dcp-alone-all"),
        pytest.param({"pcp": 2, "dcp": 2}, [range(2), range(2, 4)], id="dcp-is-pcp"),
        pytest.param(
            {"tp": 2, "pcp": 2, "dcp": 4}, [range(2), range(2), range(2, 4), range(2, 4)], id="dcp-is-tp-times-pcp"
        ),
    ],
)
def test_own_merged_heads(world, heads):
    topology = Topology(**world)
    found = [range(4)[own_merged_heads(topology, rank, 4)] for rank in range(topology.world_size)]
    assert found == heads
