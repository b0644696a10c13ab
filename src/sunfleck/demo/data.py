"""The data that the demo trains on: nothing is downloaded, and all of it is ready in a fraction of a second.

Digits: the 1,797 scanned digits of 8 x 8 pixels that scikit-learn ships. Each is used in nine positions, shifted by
at most one pixel each way, which makes the task harder and the test set nine times as fine.
Text: the language reference inside Python itself (`pydoc_data.topics`), about 460,000 characters.
"""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

TEST_EVERY = 5
"""One digit in so many is kept for the test."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set of shifted digits: images (1, 8, 8) between 0 and 1, and their labels."""
    images, labels = read_digits()
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    shifted = np.stack([padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)], axis=1)
    test = np.arange(len(labels)) % TEST_EVERY == 0
    return _dataset(shifted[~test], labels[~test]), _dataset(shifted[test], labels[test])


def text(context: int, *, train_chars: int = 200_000) -> tuple[TensorDataset, TensorDataset, int]:
    """Training and test set of character sequences: (context + 1) tokens each, and the size of the alphabet.

    Characters beyond ASCII count as one. Each training sequence begins with the last character of the one before."""
    alphabet, numbers = read_text()
    tokens = torch.from_numpy(numbers)
    train, test = tokens[:train_chars], tokens[train_chars : train_chars + 30_000]
    return (
        TensorDataset(train.unfold(0, context + 1, context).contiguous()),
        TensorDataset(test.unfold(0, context + 1, context).contiguous()),
        len(alphabet),
    )


def running_sums(n: int, length: int, seed: int) -> TensorDataset:
    """`n` sequences of (value, marker) pairs, and at each place the sum of the values marked so far."""
    rng = np.random.default_rng(seed)
    values = rng.random((n, length), np.float32)
    markers = (rng.random((n, length)) < 0.2).astype(np.float32)
    sums = np.cumsum(values * markers, axis=1, dtype=np.float32)
    pairs = np.stack([values, markers], axis=2)
    return TensorDataset(torch.from_numpy(pairs), torch.from_numpy(sums))


@cache
def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The alphabet, and the text as numbers of its characters."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    return np.unique(np.frombuffer(whole.encode("ascii", "replace"), np.uint8), return_inverse=True)


@cache
def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 8, 8) and labels. Reads the file in scikit-learn's package: importing scikit-learn takes far
    longer than training starts to need; should the file have moved, scikit-learn is asked after all."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install 'sunfleck[demo]'")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        with gzip.open(path, "rt", encoding="ascii") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.float32)
        return table[:, :64].reshape(-1, 8, 8) / 16.0, table[:, 64].astype(np.int64)
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images.astype(np.float32) / 16.0, found.target.astype(np.int64)


def _dataset(shifted: np.ndarray, labels: np.ndarray) -> TensorDataset:
    images = torch.from_numpy(shifted.reshape(-1, 1, 8, 8).copy())
    return TensorDataset(images, torch.from_numpy(np.repeat(labels, shifted.shape[1])))
