"""Train a small network on scikit-learn's digits, on however many nodes there are at the moment.

    python examples/train_digits.py                          # as any script, one process
    sunfleck submit examples/train_digits.py --nodes 1:8     # on a pool; `sunfleck up` starts one

The lines marked (1) to (4) are all that sunfleck needs. Nodes may come and go while it trains: the batch size and
the sequence of samples stay what they are here.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import sunfleck.elastic

parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits.")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch", type=int, default=64, help="samples a step, over all nodes together")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

run = sunfleck.elastic.init()  # (1) find out whether this is a worker of a pool, or all alone

torch.manual_seed(args.seed)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
test = torch.arange(len(labels)) % 5 == 0
train_set = TensorDataset(images[~test], labels[~test])
test_set = TensorDataset(images[test], labels[test])

model: nn.Module = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
# The batch size is that of one step of training. Each of n workers computes an n-th of it.
loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)
test_loader = DataLoader(test_set, batch_size=256)

model, optimizer, loader = run.prepare(model, optimizer, loader)  # (2) hand over what is trained, and on what


def judge(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums over one batch, and `n`, how many they are over: the mean is taken over all batches of all workers."""
    x, y = batch
    hits = (model(x).argmax(1) == y).sum()
    return {"accuracy": hits, "n": torch.tensor(len(y))}


for epoch in run.epochs(args.epochs):  # (3) begins where this job stood, should all its nodes have been taken
    for x, y in loader:
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)  # (4) optional: shown by `sunfleck jobs` and in reports
    accuracy = run.evaluate(judge, test_loader)["accuracy"]
    run.report(accuracy=accuracy)
    if run.is_main:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
