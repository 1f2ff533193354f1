from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.store.experiments import ExperimentStore, state_root
from hpc_det.store.folders import ExperimentFolder, TrialFolder, job_log
from tests.facts import refused

TAKE_IDS = """
import sys
from pathlib import Path
from hpc_det.store.experiments import ExperimentStore

store = ExperimentStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    print(store.create().id)
"""


@pytest.fixture
def store(tmp_path: Path) -> ExperimentStore:
    return ExperimentStore(tmp_path / "root")


@pytest.mark.integration
def test_processes_that_create_at_the_same_time_get_different_ids(store: ExperimentStore) -> None:
    command = [sys.executable, "-c", TAKE_IDS, str(store.root)]
    pipe = subprocess.PIPE
    creators = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for creator in creators:
        assert creator.stdout is not None
        assert creator.stdout.readline() == "ready\n"
    for creator in creators:
        assert creator.stdin is not None
        creator.stdin.write("go\n")
        creator.stdin.flush()
    ids = [int(line) for creator in creators for line in creator.communicate()[0].split()]
    assert sorted(ids) == list(range(1, 201))


def test_ids_count_from_one_and_go_on_after_the_highest(store: ExperimentStore) -> None:
    assert store.next_id() == 1
    assert [store.create().id, store.create().id] == [1, 2]
    (store.root / "experiments" / "41").mkdir()
    (store.root / "experiments" / "notes").mkdir()
    assert store.next_id() == 42


def test_an_experiment_folder_is_its_owners_alone(store: ExperimentStore) -> None:
    folder = store.create()
    for path in (folder.path, folder.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_only_experiments_that_were_created_to_the_end_are_listed(store: ExperimentStore) -> None:
    for _ in range(11):
        store.create().config.touch()
    store.folder(3).config.unlink()
    assert [folder.id for folder in store.all()] == [1, 2, *range(4, 12)]
    assert list(ExperimentStore(store.root / "nothing").all()) == []


def test_an_unknown_experiment_is_a_usage_error_that_names_the_place(store: ExperimentStore) -> None:
    store.create()
    with refused(UsageError, "experiment 1", store.root, "`hpc-det experiment list`"):
        store.existing(1)


def test_a_removed_experiment_is_gone_with_all_its_files(store: ExperimentStore) -> None:
    folder = store.create()
    folder.trial().logs.mkdir(parents=True)
    folder.remove()
    assert not folder.path.exists()


def files_of(folder: TrialFolder | ExperimentFolder) -> list[Path]:
    names = [name for name, member in vars(type(folder)).items() if isinstance(member, property) and name != "id"]
    values = (getattr(folder, name) for name in names)
    return [value for value in values if isinstance(value, Path)]


def test_every_file_of_a_trial_has_a_name_of_its_own(tmp_path: Path) -> None:
    trial = TrialFolder(tmp_path / "7")
    paths = files_of(trial)
    paths += [trial.rendezvous(1), trial.rendezvous(2), trial.failures(1), trial.failures(2)]
    paths += [trial.rank_log(1, 0), trial.rank_log(1, 1), trial.rank_log(2, 0)]
    assert len(set(paths)) == len(paths)
    assert all(path.is_relative_to(tmp_path / "7") for path in paths)


def test_every_file_of_an_experiment_has_a_name_of_its_own(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path)
    scripts = [experiment.script(number) for number in (1, 2)]
    logs = [job_log(scripts[0]), job_log(scripts[1]), job_log(scripts[0], "-3"), job_log(scripts[1], "-3")]
    paths = [*files_of(experiment), *scripts, experiment.job(1), experiment.job(2), *logs]
    paths += [experiment.trial(1).path, experiment.trial(2).path]
    assert len(set(paths)) == len(paths)
    assert all(path.is_relative_to(tmp_path) for path in paths)


def test_a_trial_knows_its_number_and_its_experiment(tmp_path: Path) -> None:
    trial = ExperimentFolder(tmp_path / "12").trial(7)
    assert trial.id == 7
    assert trial.experiment() == ExperimentFolder(tmp_path / "12")


def test_the_trials_of_an_experiment_are_those_that_have_begun_in_their_order(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path)
    assert experiment.trials() == []
    for number in (10, 2, 1):
        experiment.trial(number).path.mkdir(parents=True)
    (tmp_path / "trials" / "notes").mkdir()
    assert [trial.id for trial in experiment.trials()] == [1, 2, 10]


def test_the_state_root_is_what_the_environment_says_or_lies_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert state_root({}) == tmp_path / "hpc_det"
    assert state_root({"HPC_DET_ROOT": ""}) == tmp_path / "hpc_det"
    assert state_root({"HPC_DET_ROOT": "~/state"}) == tmp_path / "state"
    assert state_root({"HPC_DET_ROOT": "relative"}) == tmp_path / "relative"
