"""A recurrent network that learns to add up the marked numbers of a sequence. Its steps follow one after the other,
so splitting the batch saves little: this job gains from a second node and hardly from a fourth."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import sunfleck.elastic
from sunfleck.demo.data import running_sums


class Adder(nn.Module):
    """Sequences of (value, marker) to the running sum of the marked values."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.memory = nn.GRU(2, width, batch_first=True)
        self.read = nn.Linear(width, 1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        states, _ = self.memory(pairs)
        return self.read(states).squeeze(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40, help="stop after so many, target or not")
    parser.add_argument("--batch", type=int, default=256, help="sequences a step, over all nodes")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--target", type=float, default=0.03, help="mean squared test error at which to stop")
    parser.add_argument("--length", type=int, default=32, help="numbers a sequence")
    parser.add_argument("--sequences", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = Adder()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loader = DataLoader(running_sums(args.sequences, args.length, 1), batch_size=args.batch, shuffle=True)
    test_loader = DataLoader(running_sums(1024, args.length, 2), batch_size=256)

    run = sunfleck.elastic.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def judge(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        pairs, sums = batch
        error = functional.mse_loss(model(pairs), sums, reduction="sum")
        return {"test_error": error, "n": torch.tensor(sums.numel())}

    for _ in run.epochs(args.epochs):
        for pairs, sums in loader:
            loss = functional.mse_loss(model(pairs), sums)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
        test_error = run.evaluate(judge, test_loader)["test_error"]
        run.report(test_error=test_error)
        if test_error <= args.target:
            break


if __name__ == "__main__":
    main()
