"""A wide perceptron on shifted digits. Many weights and little arithmetic: exchanging gradients soon outweighs more
nodes, so this job scales worst of the four."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import sunfleck.elastic
from sunfleck.demo.data import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=80, help="stop after so many, target or not")
    parser.add_argument("--batch", type=int, default=1024, help="samples a step, over all nodes")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--target", type=float, default=0.965, help="test accuracy at which to stop")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, test = digits()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(train, batch_size=args.batch, shuffle=True)
    test_loader = DataLoader(test, batch_size=1024)

    run = sunfleck.elastic.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def judge(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        hits = (model(x).argmax(1) == y).sum()
        return {"accuracy": hits, "n": torch.tensor(len(y))}

    for _ in run.epochs(args.epochs):
        for x, y in loader:
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
        accuracy = run.evaluate(judge, test_loader)["accuracy"]
        run.report(accuracy=accuracy)
        if accuracy >= args.target:
            break


if __name__ == "__main__":
    main()
