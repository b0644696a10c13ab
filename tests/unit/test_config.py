from __future__ import annotations

import math
import os
import stat

import pytest

from sunfleck import api
from sunfleck.config import Config, load, private_dir
from sunfleck.core.errors import InvalidRequest


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("SUNFLECK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def write_file(tmp_path, text):
    folder = tmp_path / "config" / "sunfleck"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)


def test_flag_beats_memory_beats_environment_beats_file(tmp_path, monkeypatch):
    write_file(tmp_path, "nodes = 1\nnode_cpus = 0.1\nt_fwd_s = 1.0\ngrace_s = 1.0\n")
    monkeypatch.setenv("SUNFLECK_NODES", "2")
    monkeypatch.setenv("SUNFLECK_NODE_CPUS", "0.2")
    monkeypatch.setenv("SUNFLECK_T_FWD_S", "2")
    config = load({"nodes": 4}, remembered={"nodes": 3, "node_cpus": 0.3})
    assert (config.nodes, config.node_cpus, config.t_fwd_s, config.grace_s) == (4, 0.3, 2.0, 1.0)


def test_unset_flags_do_not_count():
    assert load({"nodes": None}) == Config()


def test_lists_come_from_the_environment_by_commas(monkeypatch):
    monkeypatch.setenv("SUNFLECK_WARM", "torch,numpy")
    assert load().warm == ("torch", "numpy")


@pytest.mark.parametrize(
    ("text", "says"),
    [("nodez = 1", "unknown setting 'nodez'"), ('nodes = "many"', "nodes"), ("nodes = ", "not valid TOML")],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, text, says):
    write_file(tmp_path, text)
    with pytest.raises(InvalidRequest, match=r"config\.toml") as caught:
        load()
    assert says in str(caught.value)


def test_a_named_file_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("SUNFLECK_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(InvalidRequest, match="does not exist"):
        load()


def test_a_bad_environment_variable_is_refused(monkeypatch):
    monkeypatch.setenv("SUNFLECK_NODES", "x")
    with pytest.raises(InvalidRequest, match=r"environment .*nodes"):
        load()


@pytest.mark.parametrize(
    "flags",
    [
        {"nodes": -1},
        {"node_cpus": -1.0},
        {"port": 70000},
        {"pool": "a/b"},
        {"pool": ".."},
        {"patience_s": 0},
        {"node_cpus": math.nan},
    ],
)
def test_values_out_of_range_are_refused(flags):
    with pytest.raises(InvalidRequest):
        load(flags)


def test_run_dir_is_short_stable_and_differs_between_pools(tmp_path):
    deep = tmp_path / ("x" * 120)
    one = load({"pool": "one", "home": str(deep)})
    assert len(str(one.run_dir)) < 90
    assert one.run_dir == load({"pool": "one", "home": str(deep)}).run_dir
    assert one.run_dir != load({"pool": "two", "home": str(deep)}).run_dir
    assert one.run_dir != load({"pool": "one", "home": str(tmp_path)}).run_dir


def test_private_dir_shuts_others_out(tmp_path):
    folder = tmp_path / "pool"
    folder.mkdir(mode=0o755)
    assert stat.S_IMODE(private_dir(folder).stat().st_mode) == 0o700


def test_private_dir_refuses_links_and_files(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file", "file/below"):
        with pytest.raises(InvalidRequest):
            private_dir(tmp_path / name)


@pytest.mark.parametrize("text", ["[1]", "{", '{"node_cpus": null}'])
def test_damaged_remembered_settings_are_named_with_the_way_out(tmp_path, monkeypatch, text):
    monkeypatch.setenv("SUNFLECK_HOME", str(tmp_path))
    folder = private_dir(tmp_path / "pools" / "default")
    (folder / api.REMEMBERED).write_text(text)
    with pytest.raises(InvalidRequest, match="--fresh"):
        api.settings({})
    assert api.settings({}, fresh=True).pool == "default"


def test_the_last_words_are_those_of_the_controller_that_ended(tmp_path):
    log = tmp_path / "controller.log"
    log.write_text("older\nsunfleck: it is already up\n2026-01-01 00:00:00,000 INFO sunfleck: the other is up\n")
    assert api._last_words(log, len("older\n")) == "it is already up"
