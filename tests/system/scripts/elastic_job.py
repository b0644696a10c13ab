"""A small training job for tests of the elastic runtime: saves its final weights, can be slowed down."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sunfleck.elastic

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--batch", type=int, default=48)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--checkpoint", type=float, default=10.0)
parser.add_argument("--out", default="")
parser.add_argument("--norm", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--crash-at", type=int, default=-1)
parser.add_argument("--evaluate-every", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(1)
generator = torch.Generator().manual_seed(0)
x = torch.randn(args.samples, 20, generator=generator, dtype=torch.float64)
y = (x[:, :3].sum(1) > 0).long()
data = TensorDataset(x, y)
layers: list[nn.Module] = [nn.Linear(20, args.width), nn.ReLU()]
if args.norm:
    layers.append(nn.BatchNorm1d(args.width))
model: nn.Module = nn.Sequential(*layers, nn.Linear(args.width, 2)).double()
if args.optimizer == "sgd":
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
by_step = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.8)
run = sunfleck.elastic.init(seed=3, checkpoint_s=args.checkpoint)
model, optimizer, by_step, loader = run.prepare(
    model, optimizer, by_step, DataLoader(data, batch_size=args.batch, shuffle=True)
)
check = DataLoader(data, batch_size=100)


def judge(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).sum(), "n": torch.tensor(len(batch[1]))}


for _ in run.epochs(args.epochs):
    for a, b in loader:
        loss = nn.functional.cross_entropy(model(a), b)
        (loss / args.accumulate).backward()
        if (run.step + 1) % args.accumulate == 0:  # run.step, because a step may be served again
            optimizer.step()
            optimizer.zero_grad()
            by_step.step()
        run.report(loss=loss)
        if args.sleep:
            time.sleep(args.sleep)
        if args.evaluate_every and run.step % args.evaluate_every == 0:
            run.evaluate(judge, check)
        if run.step == args.crash_at and run.is_main:
            raise ValueError("the script is wrong")
    run.report(accuracy=run.evaluate(judge, check)["accuracy"])
if run.is_main and args.out:
    torch.save(
        {"model": model.state_dict(), "lr": by_step.get_last_lr(), "step": run.step, "samples": run.samples}, args.out
    )
