"""A tiny regression whose run can be made long or short, for tests of the pool."""

from __future__ import annotations

import argparse
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import sunfleck.elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--pause", type=float, default=0.005, help="seconds a step takes at least")
args = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(args.samples, 8, generator=torch.Generator().manual_seed(1))
y = x @ torch.linspace(-1, 1, 8).unsqueeze(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

run = sunfleck.elastic.init(checkpoint_s=1.0)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs(args.epochs):
    loss = torch.zeros(())  # a worker that joins after the epoch's last step has no step in this epoch
    for a, b in loader:
        loss = torch.nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss)
        time.sleep(args.pause)
    print(f"epoch {epoch} rank {run.rank} of {run.world} loss {loss.item():.4f}", flush=True)
