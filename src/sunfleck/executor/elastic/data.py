"""PURE. Which samples each rank trains in each step: one global cursor over a seeded permutation per epoch.

The cursor counts positions of the permutation, not batches of a rank, so it means the same at every number of
workers. Step after step takes the next `batch` positions (fewer at the end of an epoch: nothing is padded, nothing is
dropped), and the ranks split them into contiguous shares whose lengths differ by at most one.

The index hash lets the ledger prove what was trained without listing it: every dataset index is mixed to 64 bits and
the results are added modulo 2**63. Addition commutes, so the sum over ranks, steps and rounds of one epoch must equal
the hash of 0..n-1, whoever trained what. A lost or repeated sample leaves it equal with probability 2**-63.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ledger import Verdict, verify

__all__ = [
    "HASH_MODULUS",
    "Verdict",
    "epoch_hash",
    "index_hash",
    "join_hash",
    "permutation",
    "share",
    "split_hash",
    "verify",
]

HASH_MODULUS = 1 << 63
_MASK_64 = (1 << 64) - 1
_PART_BITS = 21
_PART_MASK = (1 << _PART_BITS) - 1
N_HASH_PARTS = 3


def permutation(seed: int, epoch: int, n_samples: int, *, shuffle: bool = True) -> NDArray[np.int64]:
    """The order in which one epoch visits the dataset: a function of (seed, epoch, n_samples) and nothing else.

    Philox takes (seed, epoch) as its key, so that epochs are independent streams and any epoch can be made without
    the ones before it. Without `shuffle` it is the identity.
    """
    if not shuffle:
        return np.arange(n_samples, dtype=np.int64)
    key = np.array([seed & _MASK_64, epoch & _MASK_64], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(n_samples)


def share(start: int, stop: int, rank: int, world: int) -> tuple[int, int]:
    """The positions [lo, hi) out of [start, stop) that `rank` of `world` trains. The first ranks take the remainder.

    Raises ValueError for a rank that is not in the world.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in a world of {world}")
    base, extra = divmod(stop - start, world)
    low = start + rank * base + min(rank, extra)
    return low, low + base + (1 if rank < extra else 0)


def index_hash(indices: NDArray[np.int64]) -> int:
    """Additive hash of a set of dataset indices, modulo 2**63; independent of their order."""
    z = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return int(np.add.reduce(z, dtype=np.uint64)) % HASH_MODULUS


def epoch_hash(n_samples: int) -> int:
    """index_hash of 0..n_samples-1: what the hashes of one whole epoch must add up to."""
    return index_hash(np.arange(n_samples, dtype=np.int64))


def split_hash(value: int) -> tuple[float, float, float]:
    """A hash as three numbers below 2**21, whose sums over up to 2**31 ranks are exact in float64."""
    return (
        float(value & _PART_MASK),
        float((value >> _PART_BITS) & _PART_MASK),
        float(value >> (2 * _PART_BITS)),
    )


def join_hash(parts: tuple[float, float, float]) -> int:
    """Sum of hashes from the sums of their parts."""
    low, middle, high = (int(p) for p in parts)
    return (low + (middle << _PART_BITS) + (high << (2 * _PART_BITS))) % HASH_MODULUS
