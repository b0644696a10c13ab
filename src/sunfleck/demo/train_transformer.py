"""A small transformer that learns to write like Python's language reference, one character at a time. The most
arithmetic of the four for each weight that has to be exchanged."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import sunfleck.elastic
from sunfleck.demo.data import text


class Block(nn.Module):
    """Masked self-attention and a feed-forward layer, each around a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, dim=2)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(x)


class Writer(nn.Module):
    """Tokens (batch, length) to the logits of each next token."""

    def __init__(self, alphabet: int, context: int, width: int = 48, heads: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(alphabet, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, alphabet))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.place(places)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=25, help="stop after so many, target or not")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step, over all nodes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--target", type=float, default=1.8, help="test loss (nats a character) at which to stop")
    parser.add_argument("--context", type=int, default=32, help="characters a sequence")
    parser.add_argument("--chars", type=int, default=200_000, help="characters of the text to train on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, test, alphabet = text(args.context, train_chars=args.chars)
    model = Writer(alphabet, args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=args.batch, shuffle=True)
    test_loader = DataLoader(test, batch_size=128)

    run = sunfleck.elastic.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def surprise(tokens: torch.Tensor, reduction: str) -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)

    def judge(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        (tokens,) = batch
        return {"test_loss": surprise(tokens, "sum"), "n": torch.tensor(tokens[:, 1:].numel())}

    for _ in run.epochs(args.epochs):
        for (tokens,) in loader:
            loss = surprise(tokens, "mean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.report(loss=loss)
        test_loss = run.evaluate(judge, test_loader)["test_loss"]
        run.report(test_loss=test_loss)
        if test_loss <= args.target:
            break


if __name__ == "__main__":
    main()
