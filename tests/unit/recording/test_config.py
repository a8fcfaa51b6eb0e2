# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from rl_insight_hooks.config import Config, changed, load_config
from rl_insight_hooks.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("RL_INSIGHT_HOOKS", "RL_INSIGHT_HOOKS_CONFIG", "RL_INSIGHT_HOOKS_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_off_without_any_flag():
    assert load_config({}).enable is False
    assert load_config({"trainer": {"steps": 3}}).enable is False
    assert load_config(None).enable is False


@pytest.mark.parametrize("block", ["generate", "generate_config"])
@pytest.mark.parametrize("prefix", ["", "eplb_"])
def test_mindspeed_rl_keys(block, prefix):
    config = load_config({block: {f"{prefix}token_collects": True}})
    assert config.enable
    assert config.path == "json_file"
    given = load_config(
        {block: {f"{prefix}token_collects": True, f"{prefix}token_save_path": "loads"}}
    )
    assert given.path == "loads"
    assert not load_config({block: {f"{prefix}token_collects": False}}).enable


def test_own_block_wins_over_mindspeed_rl_keys():
    config = load_config(
        {
            "generate_config": {"token_collects": True, "token_save_path": "theirs"},
            "rl_insight_hooks": {"path": "ours"},
        }
    )
    assert config.enable
    assert config.path == "ours"


def test_yaml_file_and_dictconfig(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "rl_insight_hooks: {enable: true, path: out, steps: 1-3}\nother: ${nowhere:x}\n"
    )
    assert load_config(path).steps == "1-3"
    config = load_config(OmegaConf.load(path))
    assert (config.enable, config.path) == (True, "out")


def test_unknown_key_names_the_key_and_the_nearest():
    with pytest.raises(
        ConfigError, match=r"rl_insight_hooks\.flush_intervall.*did you mean .*flush_interval"
    ):
        load_config({"rl_insight_hooks": {"flush_intervall": 3}})
    with pytest.raises(ConfigError, match="rolse"):
        changed(Config(), {"rolse": ["a"]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable", "yes"),
        ("every", 0),
        ("every", True),
        ("flush_interval", 0),
        ("flush_interval", "soon"),
        ("detail", "everything"),
        ("path", ""),
        ("roles", 3),
        ("phases", ["backwards"]),
        ("steps", "7-3"),
        ("steps", "one"),
        ("gmm_per_layer", -1),
        ("num_experts", 0),
    ],
)
def test_bad_value_is_named(key, value):
    with pytest.raises(ConfigError, match=key):
        load_config({"rl_insight_hooks": {"enable": True, key: value}})


def test_block_that_is_no_mapping():
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_config({"rl_insight_hooks": True})


def test_missing_and_broken_yaml(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1, 2\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(broken)


def test_environment_beats_everything(monkeypatch, tmp_path):
    monkeypatch.setenv("RL_INSIGHT_HOOKS", "0")
    assert not load_config({"rl_insight_hooks": {"enable": True}}).enable
    monkeypatch.setenv("RL_INSIGHT_HOOKS", "1")
    assert load_config({"rl_insight_hooks": {"enable": False}}).enable
    monkeypatch.setenv("RL_INSIGHT_HOOKS_PATH", str(tmp_path))
    assert load_config({}).path == str(tmp_path)
    file = tmp_path / "named.yaml"
    file.write_text("rl_insight_hooks: {role: from_file}\n")
    monkeypatch.setenv("RL_INSIGHT_HOOKS_CONFIG", str(file))
    assert load_config().role == "from_file"


def test_filters():
    config = Config(steps="1,3-5", every=2, roles=["a"], ranks="0,4-7")
    assert [s for s in range(8) if config.wants_step(s)] == [4]
    assert config.wants_step(None)
    assert config.wants_role("a")
    assert not config.wants_role("b")
    assert [r for r in range(9) if config.wants_rank(r)] == [0, 4, 5, 6, 7]


@pytest.mark.parametrize("value", [3, "3", [3], "[3]"])
def test_steps_in_every_spelling(value):
    config = load_config({"rl_insight_hooks": {"steps": value}})
    assert [s for s in range(6) if config.wants_step(s)] == [3]
