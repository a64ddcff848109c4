"""Every kernel of the package with the constants it is launched with, to compile them all without a GPU.

`all_kernels()` joins the lists of the files beside this one: a kernel that is in none of them is not shipped.
"""

from cpkit.kernels.registry.entry import KernelEntry
from cpkit.kernels.registry.exchange import exchange_entries
from cpkit.kernels.registry.gather import gather_kernels
from cpkit.kernels.registry.indexer import indexer_kernels
from cpkit.kernels.registry.metadata import metadata_kernels
from cpkit.kernels.registry.metadata_rows import row_kernels
from cpkit.kernels.registry.paged_logits import paged_logits_entries


def all_kernels() -> list[KernelEntry]:
    """One entry for each kernel and each set of constants that the wrappers launch."""
    indexer = [*indexer_kernels(), *paged_logits_entries(), *exchange_entries()]
    return [*gather_kernels(), *metadata_kernels(), *row_kernels(), *indexer]
