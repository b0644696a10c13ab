"""What `prepare` puts around models, optimizers and schedulers so that a step is either applied by all or by none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .comm import Comm


class ElasticModel(nn.Module):  # type: ignore[misc]
    """The user's model, whose gradients are summed over the ranks of the round in force.

    A DistributedDataParallel is made anew for each round; it is only used where gradients are made. state_dict and
    attributes are the model's own.
    """

    def __init__(self, module: nn.Module, find_unused: bool, on_error: Callable[[BaseException], None]) -> None:
        super().__init__()
        self.module = module
        self._find_unused = find_unused
        self._on_error = on_error
        object.__setattr__(self, "_parallel", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parallel = self._parallel
        if parallel is None or not torch.is_grad_enabled() or not self.module.training:
            return self.module(*args, **kwargs)
        try:
            return parallel(*args, **kwargs)
        except RuntimeError as error:
            # DDP talks to the peers itself when it rebuilds its buckets. If the error is the user's, it comes again.
            result = self.module(*args, **kwargs)
            self._on_error(error)
            return result

    def parallelise(self, comm: Comm | None, hook: Callable[[Any, Any], Any] | None) -> None:
        """Use these ranks from now on (None: alone). Local; all ranks of the round do the same."""
        object.__setattr__(self, "_parallel", None)
        if comm is None or not any(p.requires_grad for p in self.module.parameters()):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            parallel = nn.parallel.DistributedDataParallel(
                self.module,
                process_group=comm.group,
                init_sync=False,
                broadcast_buffers=False,
                find_unused_parameters=self._find_unused,
            )
        parallel.register_comm_hook(None, hook)
        object.__setattr__(self, "_parallel", parallel)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def guard_optimizer(optimizer: Any, may_step: Callable[[Any], bool]) -> None:
    """Before each step of the optimizer ask `may_step`; if it may not, its gradients are taken away, which makes the
    step do nothing (torch's optimizers skip parameters without a gradient, and do not count the step)."""

    def before(guarded: Any, args: Any, kwargs: Any) -> None:
        if not may_step(guarded):
            for group in guarded.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    optimizer.register_step_pre_hook(before)


def guard_scheduler(scheduler: Any, may_step: Callable[[], bool]) -> None:
    """Make scheduler.step() do nothing in a step that will be trained again."""
    step = scheduler.step

    def guarded(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs) if may_step() else None

    scheduler.step = guarded


def gradient_hook(comm: Comm, weight: Callable[[], float], after_last: Callable[[], None]) -> Callable[[Any, Any], Any]:
    """DDP communication hook: the mean over the global batch, from shares that may differ in size.

    Each rank's gradient is a mean over its own share, so it enters the sum with weight n_local / n_global. The future
    never fails: a lost peer is noted in `comm.error`, and backward ends with a gradient that nobody will apply.
    """

    def hook(_: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        share = weight()
        if share > 0:
            buffer.mul_(share)
        else:
            buffer.zero_()  # not times 0: the stand-in sample may have produced inf or nan
        future: Any = torch.futures.Future()
        comm.all_reduce_future(buffer, lambda: future.set_result(buffer))
        if bucket.is_last():
            after_last()
        return future

    hook.__annotations__.clear()  # DDP compares annotations by identity, and ours are strings
    return hook


class Undo:
    """Copies of what a step changes, to put back if it turns out that not every rank could finish it."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []

    def keep_tensors(self, tensors: list[Any]) -> None:
        copies = [t.detach().clone() for t in tensors]

        def restore() -> None:
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)

        self._actions.append(restore)

    def keep_gradients(self, parameters: list[Any], accumulated: bool) -> None:
        """Put back the gradients of earlier steps; without any, there shall be none."""
        copies = [p.grad.clone() if accumulated and p.grad is not None else None for p in parameters]

        def restore() -> None:
            for parameter, copy in zip(parameters, copies, strict=True):
                parameter.grad = copy

        self._actions.append(restore)

    def keep_state(self, owner: Any, copy: Callable[[Any], Any]) -> None:
        saved = copy(owner.state_dict())
        self._actions.append(lambda: owner.load_state_dict(saved))

    def restore(self) -> None:
        for action in reversed(self._actions):
            action()
        self._actions.clear()
