"""Device memory of the builders: tensors with fixed addresses, so that captured graphs find each step's values there.

A step takes the front of a buffer; the rest is reset, so that a small step leaves nothing of a large one behind.
fill=0, a step of 5 rows, then one of 2:

    front(5)    a b c d e | 0 0 0
    front(2)    f g | 0 0 0 0 0 0       same address
"""

import math

import torch

from cpkit.errors import PlanError


class Buffer:
    """One tensor with a fixed address.

    shape: largest step; a step takes leading rows of it. fill: value behind them. Raises PlanError when a step is
    larger.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, fill: int = 0
    ) -> None:
        self.name = name
        self.fill = fill
        self.tensor = torch.full(shape, fill, dtype=dtype, device=device)

    def front(self, num_rows: int) -> torch.Tensor:
        """The first rows, which the caller writes in full; the rows behind them are reset."""
        self._check_room(num_rows, self.tensor.shape[0])
        self.tensor[num_rows:].fill_(self.fill)
        return self.tensor[:num_rows]

    def front_of_width(self, num_rows: int, width: int) -> torch.Tensor:
        """[num_rows, width], packed at the start of a 1-D buffer; the elements behind are reset."""
        size = math.prod((num_rows, width))
        self._check_room(size, self.tensor.numel())
        self.tensor[size:].fill_(self.fill)
        return self.tensor[:size].view(num_rows, width)

    def corner(self, num_rows: int, width: int) -> torch.Tensor:
        """[num_rows, width], the upper left of a 2-D buffer, which the caller writes in full.

        Rows behind stay as they are: a block table buffer is large, and kernels get this view of it alone.
        """
        self._check_room(num_rows, self.tensor.shape[0])
        self._check_room(width, self.tensor.shape[1])
        return self.tensor[:num_rows, :width]

    def _check_room(self, size: int, room: int) -> None:
        if size > room:
            raise PlanError(
                f"{self.name}: a step needs {size} of a buffer of {room}, whose address captured graphs hold; build "
                "with larger limits (max_num_batched_tokens, max_num_seqs, max_blocks), or split the step"
            )
