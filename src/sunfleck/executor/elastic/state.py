"""Training state as values: a skeleton of plain Python objects plus a list of tensors, to be copied, sent or saved.

Everything with state_dict() and load_state_dict() takes part: models, optimizers, schedulers and whatever the user
registers. The skeleton travels as what torch.save writes and is read with weights_only=True, so that neither a peer
nor a file can make a worker run code.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch

_SMALL_BYTES = 1 << 20
"""Tensors below this are packed together before they are sent; larger ones go by themselves, without a copy."""


_HOLE = "\0tensor"
"""(_HOLE, n) marks the place of tensor number n in a skeleton."""


def split(value: Any, tensors: list[Any]) -> Any:
    """Skeleton of `value`; its tensors are appended to `tensors` (not copied)."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return (_HOLE, len(tensors) - 1)
    if isinstance(value, dict):
        return {k: split(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [split(v, tensors) for v in value]
    if isinstance(value, tuple):
        return tuple(split(v, tensors) for v in value)
    return value


def join(skeleton: Any, tensors: list[Any]) -> Any:
    """Inverse of `split`."""
    if isinstance(skeleton, tuple):
        if len(skeleton) == 2 and skeleton[0] == _HOLE:
            return tensors[skeleton[1]]
        return tuple(join(v, tensors) for v in skeleton)
    if isinstance(skeleton, dict):
        return OrderedDict((k, join(v, tensors)) for k, v in skeleton.items())
    if isinstance(skeleton, list):
        return [join(v, tensors) for v in skeleton]
    return skeleton


def copied(value: Any) -> Any:
    """`value` with every tensor cloned and every container new: a snapshot that later steps do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [copied(v) for v in value]
    if isinstance(value, tuple):
        return tuple(copied(v) for v in value)
    return value


def dumps(value: Any) -> bytes:
    """Plain values and tensors to bytes. Raises TypeError naming the offence when they could not be read back."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Inverse of `dumps`; refuses anything but plain values and tensors. Tensors come to the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def send_state(comm: Any, value: Any, targets: list[int]) -> None:
    """Send `value` to each of these ranks. Raises CommFailed."""
    tensors: list[Any] = []
    skeleton = split(value, tensors)
    described = [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]
    head = torch.frombuffer(bytearray(dumps({"skeleton": skeleton, "tensors": described})), dtype=torch.uint8)
    size = torch.tensor([head.numel()], dtype=torch.int64)
    small = [t.contiguous().cpu().reshape(-1).view(torch.uint8) for t in tensors if is_small(t)]
    packed = torch.cat(small) if small else torch.empty(0, dtype=torch.uint8)
    large = [t.contiguous().cpu().reshape(-1).view(torch.uint8) for t in tensors if not is_small(t)]
    works = []
    for target in targets:
        for part in (size, head, packed, *large):
            if part.numel():
                works.append(comm.send(part, target))
    for work in works:
        comm.wait(work)


def recv_state(comm: Any, source: int) -> Any:
    """What `send_state` of rank `source` sends us. Raises CommFailed."""
    size = torch.zeros(1, dtype=torch.int64)
    comm.wait(comm.recv(size, source))
    head = torch.empty(int(size.item()), dtype=torch.uint8)
    comm.wait(comm.recv(head, source))
    record = loads(head.numpy().tobytes())
    tensors: list[Any] = [torch.empty(shape, dtype=dtype) for shape, dtype, _ in record["tensors"]]
    small = [t for t in tensors if is_small(t)]
    packed = torch.empty(sum(t.numel() * t.element_size() for t in small), dtype=torch.uint8)
    works = [comm.recv(packed, source)] if packed.numel() else []
    works += [comm.recv(t.reshape(-1).view(torch.uint8), source) for t in tensors if not is_small(t)]
    for work in works:
        comm.wait(work)
    at = 0
    for tensor in small:
        n_bytes = tensor.numel() * tensor.element_size()
        if n_bytes:
            tensor.reshape(-1).view(torch.uint8).copy_(packed[at : at + n_bytes])
        at += n_bytes
    return join(record["skeleton"], tensors)


def is_small(tensor: Any) -> bool:
    return bool(tensor.numel() * tensor.element_size() < _SMALL_BYTES)
