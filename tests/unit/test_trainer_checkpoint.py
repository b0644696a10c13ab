"""Checkpoints are whole or not there; states travel and come back as they were."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch")

from sunfleck.core.errors import InvalidRequest  # noqa: E402
from sunfleck.executor.elastic import checkpoint, state  # noqa: E402
from sunfleck.executor.elastic.lineage import Lineage  # noqa: E402


def value(n: int) -> dict[str, Any]:
    return {"weights": torch.full((3,), float(n)), "step": n}


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 9):
        checkpoint.save(tmp_path, step, value(step))
    assert checkpoint.list_steps(tmp_path) == [9, 5]
    assert checkpoint.newest_step(tmp_path) == 9
    found = checkpoint.load_newest(tmp_path, pytest.fail)
    assert found is not None
    assert found[1]["weights"].tolist() == [9.0] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000000005.ckpt", "step-000000000009.ckpt"]


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "empty", "gone"])
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, damage: str) -> None:
    checkpoint.save(tmp_path, 1, value(1))
    path = checkpoint.save(tmp_path, 2, value(2))
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[:-7])
        case "flip":
            path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
        case "foreign":
            torch.save(value(2), path)
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
    said: list[str] = []
    found = checkpoint.load_newest(tmp_path, said.append)
    assert found is not None
    assert found[0] == 1
    assert len(said) == (0 if damage == "gone" else 1)
    if damage in ("cut", "foreign", "empty"):
        assert checkpoint.newest_step(tmp_path) == 1


def test_nothing_to_load(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path / "none", pytest.fail) is None
    assert checkpoint.newest_step(tmp_path / "none") is None


def test_a_file_cannot_make_us_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("gotcha",))

    path = checkpoint.save(tmp_path, 1, {"x": Evil()})
    with pytest.raises(checkpoint.CheckpointUnreadable, match="cannot be read"):
        checkpoint.read(path)


def test_a_full_disk_leaves_the_last_checkpoint_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, value(1))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 2, value(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000001.ckpt"]


def test_the_writer_reports_what_became_of_it(tmp_path: Path) -> None:
    writer = checkpoint.Writer(tmp_path)
    writer.start(3, value(3))
    writer.wait()
    ((step, path, error),) = writer.finished()
    assert (step, error) == (3, "")
    assert path is not None
    assert path.exists()
    (tmp_path / "file").write_text("")
    broken = checkpoint.Writer(tmp_path / "file")
    broken.start(4, value(4))
    broken.wait()
    ((step, path, error),) = broken.finished()
    assert path is None
    assert error


def test_split_and_join_are_inverse() -> None:
    original = {"a": [torch.ones(2), {"b": (1, torch.zeros(1), None)}], "c": "text", 3: 4.5}
    tensors: list[Any] = []
    skeleton = state.split(original, tensors)
    assert len(tensors) == 2
    back = state.join(skeleton, tensors)
    assert isinstance(back, OrderedDict)
    assert back["a"][1]["b"][2] is None
    assert back["a"][0].tolist() == [1.0, 1.0]
    assert back[3] == 4.5


class Wire:
    """Two ranks in one process: a queue of tensors each way."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.ready = threading.Condition()

    def send(self, tensor: Any, to: int) -> None:
        with self.ready:
            self.sent.append(tensor.clone())
            self.ready.notify()

    def recv(self, tensor: Any, source: int) -> None:
        with self.ready:
            self.ready.wait_for(lambda: self.sent, 5)
            got = self.sent.pop(0)
            assert (got.dtype, got.numel()) == (tensor.dtype, tensor.numel())
            tensor.copy_(got.reshape(tensor.shape))

    def wait(self, work: Any) -> None: ...


def test_states_of_small_large_odd_and_empty_tensors_travel() -> None:
    original = {
        "large": torch.randn(400, 800),
        "small": torch.arange(5),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "plain": [1, "two", None],
    }
    wire = Wire()
    state.send_state(wire, original, [1])
    back = state.recv_state(wire, 0)
    for name, thing in original.items():
        if isinstance(thing, torch.Tensor):
            assert back[name].dtype == thing.dtype
            assert torch.equal(back[name], thing)
        else:
            assert back[name] == thing


def lineage(width: int = 4, optimizer: type = torch.optim.AdamW) -> Lineage:
    one = Lineage(None)
    model = torch.nn.Linear(3, width)
    one.models.append(model)
    one.optimizers.append(optimizer(model.parameters(), lr=0.1))
    one.schedulers.append(torch.optim.lr_scheduler.StepLR(one.optimizers[0], 2))
    return one


def step(one: Lineage) -> None:
    one.models[0](torch.ones(2, 3)).sum().backward()
    one.optimizers[0].step()
    one.optimizers[0].zero_grad()
    one.schedulers[0].step()


def test_a_restored_state_goes_on_exactly_as_the_original() -> None:
    a, b = lineage(), lineage()
    for _ in range(3):
        step(a)
    a.place.step, a.exists = 3, True
    b.restore(state.loads(state.dumps(a.capture(copy=True))), "test")
    for _ in range(3):
        step(a)
        step(b)
    assert torch.equal(a.models[0].weight, b.models[0].weight)
    assert a.schedulers[0].get_last_lr() == b.schedulers[0].get_last_lr()
    assert b.place.step == 3


@pytest.mark.parametrize("other", [{"width": 5}, {"optimizer": torch.optim.SGD}], ids=str)
def test_the_state_of_another_program_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="belongs to another program"):
        lineage(**other).restore(lineage().capture(copy=True), "the checkpoint")


def test_a_snapshot_does_not_change_with_later_steps() -> None:
    one = lineage()
    snapshot = one.capture(copy=True)
    before = snapshot["models"][0]["weight"].clone()
    step(one)
    assert torch.equal(snapshot["models"][0]["weight"], before)
