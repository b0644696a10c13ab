"""The user's API, in one ordinary process: what it does, and what it says when it is used wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler  # noqa: E402

import sunfleck.elastic  # noqa: E402
from sunfleck.elastic import InvalidRequest  # noqa: E402
from sunfleck.executor.elastic import trainer  # noqa: E402

N = 50


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_current", None)
    for name in ("SUNFLECK_AGENT_SOCKET", "SUNFLECK_WORKER", "SUNFLECK_JOB_DIR"):
        monkeypatch.delenv(name, raising=False)


def parts(batch: int = 8, **loader: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    x = torch.arange(float(N)).unsqueeze(1)
    model = nn.Linear(1, 1)
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        DataLoader(TensorDataset(x, 2 * x), batch_size=batch, **{"shuffle": True, **loader}),
    )


def train(run: Any, model: Any, optimizer: Any, loader: Any, epochs: int = 2) -> list[list[float]]:
    """Samples seen, by epoch."""
    seen = []
    for _ in run.epochs(epochs):
        seen.append([])
        for x, y in loader:
            seen[-1] += x.squeeze(1).tolist()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return seen


def test_alone_it_trains_every_sample_once_an_epoch_in_another_order() -> None:
    run = sunfleck.elastic.init()
    model, optimizer, loader = run.prepare(*parts())
    before = model.weight.item()
    first, second = train(run, model, optimizer, loader)
    assert sorted(first) == sorted(second) == [float(i) for i in range(N)]
    assert first != second
    assert model.weight.item() != before
    assert (run.step, run.samples, run.epoch, run.rank, run.world, run.is_main) == (14, 100, 2, 0, 1, True)


def test_the_seed_decides_the_order() -> None:
    orders = []
    for seed in (1, 1, 2):
        trainer._current = None
        run = sunfleck.elastic.init(seed=seed)
        orders.append(train(run, *run.prepare(*parts()), epochs=1)[0])
    assert orders[0] == orders[1] != orders[2]


def test_anything_is_returned_in_the_order_it_was_given() -> None:
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run = sunfleck.elastic.init()
    got = run.prepare(scheduler, loader, model, optimizer)
    assert got[0] is scheduler
    assert got[3] is optimizer
    assert len(got[1]) == 7
    assert set(got[2].state_dict()) == {"weight", "bias"}
    assert got[2].in_features == 1  # attributes of the model are reachable
    assert isinstance(optimizer, torch.optim.SGD)


def test_drop_last_is_honoured_and_order_kept_without_shuffle() -> None:
    run = sunfleck.elastic.init()
    seen = train(run, *run.prepare(*parts(batch=8, shuffle=False, drop_last=True)), epochs=1)
    assert seen[0] == [float(i) for i in range(48)]


def test_loader_workers_fetch_ahead_and_change_nothing() -> None:
    class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> tuple[Any, Any]:
            return torch.tensor([float(i)]), torch.tensor([float(i * i)])

    seen = []
    for n_workers in (0, 2):
        trainer._current = None
        run = sunfleck.elastic.init(seed=5)
        model, optimizer, _ = parts()
        loader = DataLoader(Squares(), batch_size=6, shuffle=True, num_workers=n_workers)
        seen.append(train(run, *run.prepare(model, optimizer, loader)))
    assert seen[0] == seen[1]


def test_evaluate_gives_means_over_n_and_sums_without_it() -> None:
    run = sunfleck.elastic.init()
    model, _, _ = run.prepare(*parts())
    model.train()
    modes = []

    def judge(batch: Any) -> dict[str, Any]:
        modes.append((model.training, torch.is_grad_enabled()))
        return {"x": batch[0].sum(), "n": len(batch[0])}

    check = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=3)
    assert run.evaluate(judge, check) == {"x": 4.5}
    assert run.evaluate(lambda b: {"x": b[0].sum()}, check) == {"x": 45.0}
    assert set(modes) == {(False, False)}
    assert model.training


def test_epochs_may_be_left_by_break() -> None:
    run = sunfleck.elastic.init()
    _, _, loader = run.prepare(*parts())
    for _ in run.epochs(5):
        for _ in loader:
            break
        break
    assert run.epoch == 0


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "init twice": (lambda run: sunfleck.elastic.init(), "called twice"),
    "prepare twice": (lambda run: (run.prepare(*parts()), run.prepare(*parts())), "called twice"),
    "epochs first": (lambda run: next(run.epochs(1)), "call run.prepare"),
    "loader outside": (lambda run: next(iter(run.prepare(*parts())[2])), "inside `for epoch in run.epochs"),
    "unknown thing": (lambda run: run.prepare(*parts(), 3), "not int"),
    "register": (lambda run: run.register("x", 3), "state_dict"),
    "sampler": (
        lambda run: run.prepare(*parts(shuffle=False, sampler=WeightedRandomSampler([1.0] * N, N))),
        "WeightedRandomSampler cannot be divided",
    ),
    "too small": (lambda run: run.prepare(*parts(batch=64, drop_last=True)), "fewer than one batch"),
    "no batch": (lambda run: run.prepare(*parts(batch=None, shuffle=False)), "batch_size"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_is_refused_with_the_reason(what: str) -> None:
    action, message = WRONG[what]
    run = sunfleck.elastic.init()
    with pytest.raises(InvalidRequest, match=message):
        action(run)


def test_iterable_datasets_are_refused() -> None:
    class Endless(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    run = sunfleck.elastic.init()
    with pytest.raises(InvalidRequest, match="IterableDataset"):
        run.prepare(DataLoader(Endless(), batch_size=2))


@pytest.mark.parametrize("value", ["high", True, [1, 2], None, torch.zeros(3)], ids=str)
def test_reports_are_numbers(value: Any) -> None:
    run = sunfleck.elastic.init()
    with pytest.raises(TypeError, match="loss"):
        run.report(loss=value)


def test_reports_take_tensors_with_gradients() -> None:
    run = sunfleck.elastic.init()
    run.report(loss=torch.ones((), requires_grad=True) * 2)


def test_a_bad_checkpoint_interval_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="checkpoint_s"):
        sunfleck.elastic.init(checkpoint_s=0)
