"""The fast composition of points gives the same configs as Hydra."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hpc_det.sweep.saved import Composer

pytestmark = pytest.mark.integration

FILES = {
    "config.yaml": """
defaults: [_self_, {db: mysql}, {optional extra: null}]
lr: 0.1
name: run-${lr}-${db.driver}
nested: {a: 1, list: [1, 2]}
secret: ???
stamp: ${now:%H%M%S%f}
hydra: {sweep: {dir: 'out/${now:%H%M%S%f}'}, job: {config: {override_dirname: {exclude_keys: [lr]}}}}
""",
    "db/mysql.yaml": "driver: mysql\nuser: me\n",
    "db/postgres.yaml": "driver: postgres\ntimeout: 10\n",
    "extra/more.yaml": "deep: {x: 1}\n",
}
POINTS = [
    [],
    ["lr=0.2"],
    ["lr=0.2", "lr=0.3"],
    ["db=postgres", "lr=0.5", "db.timeout=20"],
    ["db.user=you", "db=mysql"],
    ["extra=more", "extra.deep.x=${lr}"],
    ["+db@second=postgres", "second.timeout=1"],
    ["+new.key='a b,c'", "++new.key=2", "name='${lr}!'"],
    ["+nested={b:2}", "nested.list=[3]", "secret=x"],
    ["~nested.a", "lr=null"],
    ["+db={port:3}", "db.port=4"],
    ["hydra.job.name=other", "lr=7", "+hydra.job.env_set.A=b"],
]
WRONG = [
    ["nothing=1"],
    ["db=oracle"],
    ["+lr=3"],
    ["lr=1,2"],
    ["~missing"],
    ["db={port:3}"],
    ["lr"],
    ["db@nowhere=mysql"],
]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[DictConfig]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with initialize_config_dir(str(tmp_path), version_base="1.3", job_name="app"):
        loader = GlobalHydra.instance().config_loader()
        yield loader.load_configuration("config", ["hydra.verbose=true"], run_mode=RunMode.MULTIRUN)


@pytest.fixture
def composer(master: DictConfig) -> Composer:
    return Composer(GlobalHydra.instance().config_loader())


def text(config: DictConfig) -> str:
    return OmegaConf.to_yaml(config)


@pytest.mark.parametrize("overrides", POINTS, ids=" ".join)
def test_a_point_is_what_hydra_composes(overrides: list[str], master: DictConfig, composer: Composer) -> None:
    theirs = GlobalHydra.instance().config_loader().load_sweep_config(master, overrides)
    for _ in range(2):
        assert text(composer.load_sweep_config(master, overrides)) == text(theirs)


@pytest.mark.parametrize("overrides", [["lr=3"], ["lr='${now:%f}'"]])
def test_the_time_is_that_of_the_sweep_in_every_attempt(
    overrides: list[str], master: DictConfig, composer: Composer
) -> None:
    point = pickle.dumps(composer.point(master, overrides))
    first, second = pickle.loads(point).config(), pickle.loads(point).config()
    assert first.hydra.sweep.dir == second.hydra.sweep.dir == master.hydra.sweep.dir
    assert first.stamp == second.stamp == master.stamp
    assert first.lr == second.lr


@pytest.mark.parametrize("overrides", WRONG, ids=" ".join)
def test_what_hydra_refuses_is_refused_alike(overrides: list[str], master: DictConfig, composer: Composer) -> None:
    with pytest.raises(HydraException) as theirs:
        GlobalHydra.instance().config_loader().load_sweep_config(master, overrides)
    with pytest.raises(HydraException) as ours:
        composer.load_sweep_config(master, overrides)
    assert str(ours.value) == str(theirs.value)


def test_files_are_read_once_for_points_of_the_same_groups(
    master: DictConfig, composer: Composer, tmp_path: Path
) -> None:
    first = composer.point(master, ["db=postgres", "lr=1"])
    (tmp_path / "config.yaml").unlink()
    assert composer.point(master, ["db=postgres", "lr=2"]).base is first.base
