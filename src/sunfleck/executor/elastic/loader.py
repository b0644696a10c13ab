"""The user's DataLoader, served by the global cursor: same dataset and collate function, this rank's share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from sunfleck.core.errors import InvalidRequest

from .data import epoch_hash, index_hash, permutation, share

if TYPE_CHECKING:
    from .trainer import Run


class Source:
    """What a DataLoader says about its data, checked; and how to fetch any set of its samples."""

    def __init__(self, loader: Any, seed: int) -> None:
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            raise InvalidRequest(
                "elastic training needs a dataset with __len__ and __getitem__: the samples of an IterableDataset "
                "cannot be divided anew when the number of workers changes"
            )
        if loader.batch_size is None:
            raise InvalidRequest("give the DataLoader a batch_size (the global one, over all workers)")
        sampler = loader.sampler
        if isinstance(sampler, DistributedSampler):
            self.shuffle = bool(sampler.shuffle)
        elif isinstance(sampler, RandomSampler) and not sampler.replacement:
            self.shuffle = True
        elif isinstance(sampler, SequentialSampler):
            self.shuffle = False
        else:
            raise InvalidRequest(
                f"a {type(sampler).__name__} cannot be divided over a changing number of workers; "
                f"use DataLoader(..., shuffle=True) or shuffle=False"
            )
        self.dataset = dataset
        self.batch: int = loader.batch_size
        self.collate = loader.collate_fn
        self.seed = seed
        self.n_in_dataset = len(dataset)
        self.n_samples = self.n_in_dataset - (self.n_in_dataset % self.batch if loader.drop_last else 0)
        if self.n_in_dataset == 0:
            raise InvalidRequest("the dataset is empty")
        if self.n_samples == 0:
            raise InvalidRequest(
                f"the dataset has {self.n_in_dataset} samples, fewer than one batch of {self.batch}, and drop_last "
                f"leaves nothing to train; lower batch_size"
            )
        self._tensors = None
        if type(dataset) is TensorDataset and self.collate is torch.utils.data.default_collate:
            self._tensors = dataset.tensors
        self._pool = ThreadPoolExecutor(loader.num_workers, "sunfleck-data") if loader.num_workers > 0 else None
        self._order: tuple[int, Any] = (-1, None)

    def hash(self) -> int:
        """Index hash of one epoch; 0 (unknown) when drop_last leaves out other samples in each epoch."""
        return epoch_hash(self.n_samples) if self.n_samples == self.n_in_dataset else 0

    def indices(self, epoch: int, low: int, high: int) -> Any:
        """Dataset indices at these positions of the epoch's permutation."""
        if self._order[0] != epoch:
            self._order = (epoch, permutation(self.seed, epoch, self.n_in_dataset, shuffle=self.shuffle))
        return self._order[1][low:high]

    def fetch(self, indices: Any) -> Any:
        """The collated batch of these samples."""
        if self._tensors is not None:
            at = torch.from_numpy(indices)
            return [t[at] for t in self._tensors]
        return self._fetch_serially(indices.tolist())

    def fetch_ahead(self, indices: Any) -> Future[Any] | None:
        """Begin to fetch in a thread, when the user asked for loader workers."""
        if self._pool is None or self._tensors is not None:
            return None
        return self._pool.submit(self._fetch_serially, indices.tolist())

    def _fetch_serially(self, wanted: list[int]) -> Any:
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(wanted))
        return self.collate([self.dataset[i] for i in wanted])


class ElasticLoader:
    """Takes the place of the DataLoader. Iterating the training loader (the first one prepared) is what drives a run:
    each `next` is a step boundary. Other loaders give this rank's share of their batches, in order."""

    def __init__(self, run: Run, loader: Any, *, training: bool) -> None:
        self._run = run
        self._training = training
        self.loader = loader
        self.source = Source(loader, run.seed)
        self._ahead: tuple[tuple[int, int, int], Future[Any]] | None = None

    @property
    def dataset(self) -> Any:
        return self.source.dataset

    @property
    def batch_size(self) -> int:
        return self.source.batch

    def __len__(self) -> int:
        """Steps of one epoch."""
        return -(-self.source.n_samples // self.source.batch)

    def __iter__(self) -> Iterator[Any]:
        return self._run.train_batches() if self._training else self.shares()

    def shares(self) -> Iterator[Any]:
        """This rank's part of every sample once, in batches of batch_size / world, without any talk to the others."""
        return self.shares_of(self._run.rank, self._run.world)

    def shares_of(self, part: int, n_parts: int) -> Iterator[Any]:
        """`shares` for one of any number of parts."""
        low, high = share(0, self.source.n_samples, part, n_parts)
        size = max(1, -(-self.source.batch // n_parts))
        for start in range(low, high, size):
            indices = self.source.indices(0, start, min(high, start + size))
            yield to_device(self.source.fetch(indices), self._run.device)

    def take(self, epoch: int, start: int, stop: int, rank: int, world: int) -> tuple[Any, int, int]:
        """(batch, n_local, hash) of this rank's share of a step. A rank whose share is empty gets the first samples of
        the step with n_local 0: it must take part in the step's collectives, but its gradient counts for nothing."""
        low, high = share(start, stop, rank, world)
        n_local = high - low
        if n_local:
            indices = self.source.indices(epoch, low, high)
            hash_value = index_hash(indices)
        else:
            low, high = start, min(stop, start + 2)  # two, because BatchNorm cannot train on one
            indices, hash_value = self.source.indices(epoch, low, high), 0
        batch = self._from_ahead((epoch, low, high))
        if batch is None:
            batch = self.source.fetch(indices)
        next_stop = min(self.source.n_samples, stop + self.source.batch)
        if next_stop > stop:
            next_low, next_high = share(stop, next_stop, rank, world)
            ahead = (
                self.source.fetch_ahead(self.source.indices(epoch, next_low, next_high))
                if next_high > next_low
                else None
            )
            self._ahead = ((epoch, next_low, next_high), ahead) if ahead is not None else None
        return to_device(batch, self._run.device), n_local, hash_value

    def _from_ahead(self, key: tuple[int, int, int]) -> Any:
        ahead, self._ahead = self._ahead, None
        return ahead[1].result() if ahead is not None and ahead[0] == key else None


def to_device(batch: Any, device: Any) -> Any:
    """Tensors of a batch on the device of the run; anything else unchanged."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [to_device(v, device) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def is_loader(thing: Any) -> bool:
    return isinstance(thing, DataLoader)
