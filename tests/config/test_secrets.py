from __future__ import annotations

import pytest

from hpc_det.config.secrets import (
    MASK,
    masked,
    masked_lines,
    masked_names,
    masked_paths,
    masked_profile,
    shown_at,
    without_secrets,
)


def tree(variables: object, data: dict[str, object]) -> dict[str, object]:
    return {"environment": {"environment_variables": variables}, "data": data}


def test_variables_whose_names_say_so_lose_their_values() -> None:
    shown = masked(tree(["AWS_SECRET_ACCESS_KEY=abc=d", "WANDB_API_KEY=x", "OMP_NUM_THREADS=2"], {}))
    variables = shown["environment"]["environment_variables"]
    assert variables == [f"AWS_SECRET_ACCESS_KEY={MASK}", f"WANDB_API_KEY={MASK}", "OMP_NUM_THREADS=2"]


def test_variables_by_device_are_masked_too() -> None:
    shown = masked(tree({"cpu": ["HF_TOKEN=x"], "cuda": ["A=1"]}, {}))
    assert shown["environment"]["environment_variables"] == {"cpu": [f"HF_TOKEN={MASK}"], "cuda": ["A=1"]}


def test_the_secrets_of_the_data_section_are_masked() -> None:
    shown = masked(tree([], {"url": "s3://x", "secrets": {"user": "me"}}))
    assert shown["data"] == {"url": "s3://x", "secrets": {"user": MASK}}


def test_the_config_itself_keeps_them() -> None:
    config = tree(["HF_TOKEN=x"], {"secrets": {"user": "me"}})
    masked(config)
    assert config == tree(["HF_TOKEN=x"], {"secrets": {"user": "me"}})


def test_a_part_of_a_config_is_masked_as_the_whole() -> None:
    assert masked({}) == {}
    assert masked({"data": {"secrets": "all"}, "environment": None}) == {"data": {"secrets": MASK}, "environment": None}


def test_what_opens_a_store_or_a_registry_is_masked() -> None:
    storage = {"type": "s3", "bucket": "b", "access_key": "a", "secret_key": "s", "save_trial_best": 1}
    registry = {"registry_auth": {"username": "me", "password": "p"}}
    assert masked({"checkpoint_storage": storage, "environment": registry}) == {
        "checkpoint_storage": {**storage, "access_key": MASK, "secret_key": MASK},
        "environment": {"registry_auth": {"username": MASK, "password": MASK}},
    }


def test_what_is_written_wrongly_shows_no_secret() -> None:
    for variables in ("HF_TOKEN=x", {"HF_TOKEN": "x"}, [{"HF_TOKEN": "x"}]):
        assert "x" not in str(masked({"environment": {"environment_variables": variables}}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data.secrets.a", "hunter2"),
        ("data", [{"secrets": "hunter2"}]),
        ("environment", [{"environment_variables": ["A_TOKEN=hunter2"]}]),
        ("environment.registry_auth.a", "hunter2"),
        ("environment.environment_variables", {"A_TOKEN": "hunter2"}),
        ("environment.environment_variables", "A=1 A_TOKEN=hunter2"),
        ("environment.environment_variables[0]", {"A_TOKEN": "hunter2"}),
        ("environment.environment_variables[0]", "export A_TOKEN=hunter2"),
        ("environment.environment_variables[0]", " A_TOKEN=hunter2"),
        ("environment.environment_variables[0]", "MY-TOKEN=hunter2"),
        ("environment.environment_variables[0]", "A_TOKEN=hunter2\x01"),
        ("checkpoint_storage", [{"secret_key": "hunter2"}]),
        ("notify", "https://hooks/hunter2"),
        ("notify[1]", "https://hooks/hunter2"),
        ("notify[1].webhook", ["hunter2"]),
        ("cluster.environment_variables[0]", "A_KEY=hunter2\x01"),
        ("cluster.setup[0]", "export A_KEY=hunter2\x02"),
        ("cluster.experiment", [{"data": {"secrets": "hunter2"}}]),
    ],
)
def test_a_message_about_a_wrong_value_shows_no_secret(path: str, value: object) -> None:
    assert "hunter2" not in shown_at(path, value)
    assert MASK in shown_at(path, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("environment.environment_variables[0]", "OMP_NUM_THREADS"),
        ("environment.image", 6),
        ("checkpoint_storage.host_path", "tmp"),
        ("notify[0].on", ["start"]),
        ("hyperparameters.key", "token"),
        ("cluster.setup[0]", 3),
    ],
)
def test_a_message_shows_a_wrong_value_that_is_no_secret(path: str, value: object) -> None:
    assert shown_at(path, value) == repr(value)


def test_a_line_of_shell_that_sets_a_secret_is_masked_whole() -> None:
    lines = ["module load cuda", "ulimit -n 4096", "export WANDB_API_KEY=x; cd /", "HF_TOKEN='x y' true"]
    assert masked_lines(lines) == ["module load cuda", "ulimit -n 4096", MASK, MASK]


def test_a_profile_keeps_all_but_the_secrets_of_jobs() -> None:
    profile = {"name": "site", "environment_variables": ["HF_TOKEN=x", "A=1"], "setup": ["export MY_SECRET=x"]}
    assert masked_profile(profile) == {
        "name": "site",
        "environment_variables": [f"HF_TOKEN={MASK}", "A=1"],
        "setup": [MASK],
    }


def test_masks_are_found_again_where_nobody_has_set_the_secret_since() -> None:
    shown = masked(tree(["HF_TOKEN=x", "A_KEY=x", "A_KEY=y"], {"secrets": {"user": "me", "deep": {"er": "x"}}}))
    assert masked_paths(shown) == ["data.secrets.user", "data.secrets.deep.er"]
    variables = shown["environment"]["environment_variables"]
    assert masked_names([*variables, "A_KEY=mine"]) == ["HF_TOKEN"]


def test_a_text_of_a_library_loses_the_values_of_secret_variables_and_passwords_in_urls() -> None:
    env = {"WANDB_API_KEY": "0123456789", "A_TOKEN": "1", "HOME": "/home/ada"}
    text = "key 0123456789, 1 of 1, /home/ada, postgresql://ada:hunter2@db/x and ada@example.org"
    assert without_secrets(text, env) == f"key {MASK}, 1 of 1, /home/ada, postgresql://{MASK}@db/x and ada@example.org"
