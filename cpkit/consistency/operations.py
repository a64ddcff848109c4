"""The collectives of torch.distributed: how the recorder sees them entered, and what of a call must agree over ranks.

Every Python path into a collective (torch.distributed's functions, whoever imported them under whatever name, object
collectives, coalescing managers, async calls, a process group used directly) ends in a method of ProcessGroup.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Method:
    """A method of ProcessGroup.

    op: its name in a log. at, name: place and keyword of the tensors that are equally large on all ranks; -1 for none.
    rooted: its options name a root. splits: it may take split sizes, which differ from rank to rank.
    peer: place of the peer of a point-to-point call, -1 for none.
    """

    op: str
    at: int = 0
    name: str = "tensors"
    rooted: bool = False
    splits: bool = False
    peer: int = -1

    @property
    def has_extra(self) -> bool:
        """Its calls differ in more than their tensors."""
        return self.rooted or self.splits or self.peer >= 0


METHODS = {
    "allreduce": Method("all_reduce"),
    "allreduce_coalesced": Method("all_reduce_coalesced"),
    "broadcast": Method("broadcast", rooted=True),
    "reduce": Method("reduce", rooted=True),
    "allgather": Method("all_gather", 0, "output_tensors"),
    "allgather_coalesced": Method("all_gather_coalesced", 0, "output_lists"),
    "_allgather_base": Method("all_gather_into_tensor", 0, "output"),
    "all_gather_single": Method("all_gather_into_tensor", 0, "output"),
    "allgather_into_tensor_coalesced": Method("all_gather_into_tensor_coalesced", 0, "outputs"),
    "all_gather_single_coalesced": Method("all_gather_into_tensor_coalesced", 0, "outputs"),
    "gather": Method("gather", 1, "input_tensors", rooted=True),
    "scatter": Method("scatter", 0, "output_tensors", rooted=True),
    "reduce_scatter": Method("reduce_scatter", 1, "input_tensors"),
    "_reduce_scatter_base": Method("reduce_scatter_tensor", 1, "inputTensor"),
    "reduce_scatter_single": Method("reduce_scatter_tensor", 1, "inputTensor"),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter_tensor_coalesced", 1, "inputs"),
    "reduce_scatter_single_coalesced": Method("reduce_scatter_tensor_coalesced", 1, "inputs"),
    "alltoall": Method("all_to_all", 1, "input_tensors"),
    "alltoall_base": Method("all_to_all_single", 1, "input", splits=True),
    "all_to_all_single": Method("all_to_all_single", 1, "input", splits=True),
    "barrier": Method("barrier", -1),
    "monitored_barrier": Method("monitored_barrier", -1),
    "send": Method("send", peer=1),
    "recv": Method("recv", peer=1),
    "recv_anysource": Method("recv_anysource"),
}
"""torch renames methods now and then; a torch has those of its own version."""
