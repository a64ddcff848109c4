"""Rows of scores that mislead a selection by sampling or by counting, as makers of any number of them."""

from collections.abc import Callable

import torch

INF, NAN = float("inf"), float("nan")


def score_kinds(num_keys: int, device: torch.device) -> list[Callable[[int], torch.Tensor]]:
    """Each gives [rows, num_keys] fp32 for a number of rows."""
    pos = torch.arange(num_keys, device=device)

    def noise(rows: int) -> torch.Tensor:
        return torch.randn(rows, num_keys, device=device)

    def coarse(rows: int) -> torch.Tensor:
        return torch.randint(-2, 3, (rows, num_keys), device=device).float()

    def fixed(row: torch.Tensor) -> Callable[[int], torch.Tensor]:
        return lambda rows: row.float().expand(rows, -1)

    def noisy(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], torch.Tensor]:
        return lambda rows: change(noise(rows))

    return [
        noise,
        coarse,  # ties at every place
        fixed(torch.zeros_like(pos)),
        fixed(torch.where(pos % 3 == 0, -0.0, 0.0)),
        fixed(pos),
        fixed(-pos),
        fixed(torch.where(pos == num_keys // 3, 1e30, pos % 2)),
        fixed(torch.full_like(pos, -INF, dtype=torch.float32)),
        fixed(torch.full_like(pos, INF, dtype=torch.float32)),
        fixed(torch.full_like(pos, NAN, dtype=torch.float32)),
        noisy(lambda row: torch.where(pos < num_keys // 4, row, -INF)),
        noisy(lambda row: torch.where(pos < 100, row, -INF)),
        noisy(lambda row: torch.where(pos < 300, row, NAN)),
        noisy(lambda row: torch.where(pos % 2 == 0, NAN, row)),
        noisy(lambda row: torch.where((pos > num_keys / 2) & (pos < num_keys / 2 + 3000), row + 9, row)),
        noisy(lambda row: torch.where(pos // 64 % 60 == 7, row + 9, row)),
        noisy(lambda row: torch.where(pos % 512 == 5, 1e3 + pos, pos * 1e-4)),
        noisy(lambda row: torch.where(pos == num_keys // 4 * 4 - 4, 1e30, row)),
        noisy(lambda row: torch.where(torch.rand_like(row) < 0.01, row * 1e30, row)),
        noisy(lambda row: (row * 20).exp() * torch.where(torch.rand_like(row) < 0.5, 1, -1)),
        noisy(lambda row: torch.where(torch.rand_like(row) < 0.5, 1.0, 1.0000001)),
        noisy(lambda row: torch.where(torch.rand_like(row) < 0.01, INF, torch.where(row < 0, -INF, row))),
    ]
