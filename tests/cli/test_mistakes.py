"""Typical mistakes of users, and the facts that hpc-det names about each.

The table is the list: a mistake that is met in practice gets a row. Mistakes that only a training shows are in
tests/e2e/test_mistakes.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.launch.mpi import rank_command
from hpc_det.schedulers.scheduler import JobState
from tests.cli.conftest import TRIAL, Command
from tests.cli.life import FakeScheduler
from tests.cli.mistake import ANOTHER, CREATE, Mistake, User
from tests.facts import unnamed
from tests.stub import Stub
from tests.stub import stub as stub

LAUNCH = "entrypoint: python3 -m hpc_det.launch.{} --trial model_def:MyTrial\n"
SITE = """
name: atlas
scheduler: slurm
slots_per_node: 4
slot_type: gpu
max_nodes: 2
max_time_limit: 24:00:00
pools: {gpu: {default: true}, large: {max_nodes: 4}}
"""
PROFILE = "states/conf/cluster/atlas.yaml"
ON_ATLAS = f"{CREATE} --cluster atlas"
WITHOUT_ENTRYPOINT = "name: tiny\nsearcher: {metric: accuracy, max_length: 10}\n"
RUN = "run experiment=digits"


def config(*overrides: str) -> str:
    return CREATE + "".join(f" --config '{override}'" for override in overrides)


# --- the experiment file is not read

FILES = [
    Mistake(
        name="The experiment file is misspelled",
        command="experiment create tinny.yaml code",
        what=["cannot be read"],
        where=["tinny.yaml"],
        remedy=["did you mean 'tiny.yaml'?"],
    ),
    Mistake(
        name="There is no such experiment file",
        command="experiment create digits.yaml code",
        what=["No such file"],
        where=["digits.yaml"],
        values=["HERE contains tiny.yaml"],
    ),
    Mistake(
        name="The code folder is in the place of the experiment file",
        command="experiment create code tiny.yaml",
        what=["is a folder"],
        where=["code"],
        remedy=["expected a file", "experiment.yaml"],
    ),
    Mistake(
        name="A key is indented too far",
        config="name: tiny\n  entrypoint: model_def:MyTrial\n",
        what=["key: value"],
        where=["tiny.yaml:2"],
        remedy=["same indent"],
    ),
    Mistake(
        name="A key is indented like no key above it",
        config="searcher:\n  metric: accuracy\n max_length: 10\n",
        what=["indent"],
        where=["tiny.yaml:3"],
        remedy=["same indent"],
    ),
    Mistake(
        name="A key is indented by a tab",
        config="searcher:\n\tmetric: accuracy\n",
        what=["a tab"],
        where=["tiny.yaml:2"],
        remedy=["indent with spaces"],
    ),
    Mistake(
        name="A key stands twice in the file",
        add="name: other\n",
        what=["duplicate key", "'name'"],
        where=["tiny.yaml:4", "first on line 1"],
        remedy=["keep one"],
    ),
    Mistake(
        name="A colon has no blank behind it",
        config="name:tiny\nentrypoint: model_def:MyTrial\n",
        what=["key: value"],
        where=["tiny.yaml:2"],
        remedy=["a blank after each colon"],
    ),
    Mistake(
        name="The experiment is JSON that ends too early",
        config='{"name": "tiny",\n "entrypoint": "model_def:MyTrial"\n',
        what=["a bracket is not closed"],
        where=["tiny.yaml:3"],
        remedy=["end", "with }"],
    ),
    Mistake(
        name="The experiment file is empty",
        config="",
        what=["is empty"],
        where=["tiny.yaml"],
        remedy=["entrypoint", "searcher"],
    ),
    Mistake(
        name="The experiment file contains a list",
        config="- name: tiny\n",
        what=["a list"],
        where=["tiny.yaml"],
        values=["expected a map"],
        remedy=["`name: digits`"],
    ),
]

# --- the values of the experiment file: all of them are told together

VALUES = [
    Mistake(
        name="A key is misspelled",
        add="max_restart: 3\n",
        what=["unknown key 'max_restart'"],
        where=["tiny.yaml:4"],
        remedy=["did you mean 'max_restarts'?"],
    ),
    Mistake(
        name="A key of a section is misspelled",
        add="resources:\n  slot_per_trial: 2\n",
        what=["unknown key 'slot_per_trial'"],
        where=["tiny.yaml:5", "resources.slot_per_trial"],
        remedy=["did you mean 'slots_per_trial'?"],
    ),
    Mistake(
        name="A key is in the wrong section",
        add="max_slots: 4\n",
        what=["max_slots"],
        where=["tiny.yaml:4"],
        remedy=["did you mean 'resources.max_slots'?"],
    ),
    Mistake(
        name="A word is given for a number",
        add="max_restarts: many\n",
        what=["max_restarts"],
        where=["tiny.yaml:4"],
        values=["'many'", "a whole number >= 0"],
    ),
    Mistake(
        name="A number is out of range",
        add="max_restarts: -1\n",
        what=["max_restarts"],
        where=["tiny.yaml:4"],
        values=[-1, "a whole number >= 0"],
    ),
    Mistake(
        name="A time limit is written in words",
        add="resources: {time_limit: 3 days}\n",
        what=["resources.time_limit"],
        where=["tiny.yaml:4"],
        values=["'3 days'"],
        remedy=["D-HH:MM:SS"],
    ),
    Mistake(
        name="The metric is not given",
        config="entrypoint: model_def:MyTrial\nsearcher: {max_length: 10}\n",
        what=["searcher.metric", "required"],
        where=["searcher.metric"],
        remedy=["accuracy"],
    ),
    Mistake(
        name="smaller_is_better is misspelled",
        config="entrypoint: model_def:MyTrial\nsearcher: {metric: accuracy, smaller_is_beter: false, max_length: 10}\n",
        what=["unknown key 'smaller_is_beter'"],
        where=["tiny.yaml:2"],
        remedy=["did you mean 'smaller_is_better'?"],
    ),
    Mistake(
        name="The searcher is misspelled",
        config="entrypoint: model_def:MyTrial\nsearcher: {name: adaptive_ahsa, metric: accuracy, max_length: 10}\n",
        what=["searcher.name"],
        where=["tiny.yaml:2"],
        values=["'adaptive_ahsa'", "single, random, grid"],
        remedy=["did you mean 'adaptive_asha'?"],
    ),
    Mistake(
        name="The searcher does not exist here",
        config="entrypoint: model_def:MyTrial\nsearcher: {name: pbt, metric: accuracy, max_length: 10}\n",
        what=["'pbt'"],
        where=["searcher.name", "tiny.yaml:2"],
        remedy=["name: custom"],
    ),
    Mistake(
        name="The length of the training is not given",
        config="entrypoint: model_def:MyTrial\nsearcher: {metric: accuracy}\n",
        what=["searcher.max_length", "required"],
        where=["searcher.max_length"],
        values=["batches, records, epochs"],
        remedy=["{batches: 100}"],
    ),
    Mistake(
        name="The unit of the length is misspelled",
        config="entrypoint: model_def:MyTrial\nsearcher: {metric: accuracy, max_length: {epoch: 3}}\n",
        what=["searcher.max_length"],
        where=["tiny.yaml:2"],
        values=["{'epoch': 3}", "epochs"],
        remedy=["{batches: 100}"],
    ),
    Mistake(
        name="A key belongs to another searcher",
        config="entrypoint: model_def:MyTrial\nsearcher: {metric: accuracy, max_length: 10, max_trials: 4}\n",
        what=["searcher.max_trials", "'single' has no such key"],
        where=["tiny.yaml:2"],
        values=["random", "adaptive_asha"],
        remedy=["leave it out", "searcher.name"],
    ),
    Mistake(
        name="The kind of a range is misspelled",
        add="hyperparameters: {rate: {type: flot, minval: 0, maxval: 1}}\n",
        what=["hyperparameters.rate.type"],
        where=["tiny.yaml:4"],
        values=["'flot'", "const, categorical, int, double, log"],
    ),
    Mistake(
        name="The ends of a range are exchanged",
        add="hyperparameters: {rate: {type: double, minval: 1, maxval: 0}}\n",
        what=["hyperparameters.rate.minval"],
        where=["tiny.yaml:4"],
        values=[1, 0],
        remedy=["swap them"],
    ),
    Mistake(
        name="The batch is smaller than the number of slots",
        add="hyperparameters: {global_batch_size: 1}\nresources: {slots_per_trial: 2}\n",
        what=["hyperparameters.global_batch_size"],
        where=["tiny.yaml:4"],
        values=[1, 2],
        remedy=["at least 2", "at most 1 slot"],
    ),
    Mistake(
        name="An environment variable has no value",
        add="environment: {environment_variables: [OMP_NUM_THREADS]}\n",
        what=["environment.environment_variables[0]"],
        where=["tiny.yaml:4"],
        values=["'OMP_NUM_THREADS'"],
        remedy=["NAME=value"],
    ),
    Mistake(
        name="An environment variable is written like a key",
        add="environment:\n  environment_variables:\n  - OMP_NUM_THREADS: 4\n",
        what=["environment.environment_variables[0]"],
        where=["tiny.yaml:5"],
        values=["{'OMP_NUM_THREADS': 4}"],
        remedy=["NAME=value"],
    ),
    Mistake(
        name="An environment variable with a secret has a blank in the place of the equals sign",
        add="environment: {environment_variables: [API_TOKEN hunter2]}\n",
        what=["environment.environment_variables[0]", "API_TOKEN"],
        where=["tiny.yaml:4"],
        remedy=["NAME=value"],
        secrets=["hunter2"],
    ),
    Mistake(
        name="The secret key of a store is in a list",
        add="checkpoint_storage: {type: s3, bucket: models, access_key: me, secret_key: [hunter2]}\n",
        what=["checkpoint_storage.secret_key"],
        where=["tiny.yaml:4"],
        values=["a non-empty string"],
        secrets=["hunter2"],
    ),
    Mistake(
        name="The type of the checkpoint storage is misspelled",
        add="checkpoint_storage: {type: share_fs, host_path: /scratch}\n",
        what=["checkpoint_storage.type"],
        where=["tiny.yaml:4"],
        values=["'share_fs'", "shared_fs, directory, s3, gcs, azure"],
        remedy=["did you mean 'shared_fs'?"],
    ),
    Mistake(
        name="The folder for checkpoints is a relative path",
        add="checkpoint_storage: {type: shared_fs, host_path: checkpoints}\n",
        what=["checkpoint_storage.host_path"],
        where=["tiny.yaml:4"],
        values=["'checkpoints'", "an absolute path"],
    ),
    Mistake(
        name="A log pattern is no regular expression",
        add="log_policies: [{pattern: '(oom', action: cancel_retries}]\n",
        what=["log_policies[0].pattern"],
        where=["tiny.yaml:4"],
        values=["'(oom'", "a regular expression"],
    ),
    Mistake(
        name="A hook is one string",
        add="notify: [{command: notify.sh --all}]\n",
        what=["notify[0].command"],
        where=["tiny.yaml:4"],
        values=["'notify.sh --all'"],
        remedy=["[./notify.sh, --all]"],
    ),
    Mistake(
        name="The interpreter is given as a key",
        add="environment: {python: /opt/python3.12}\n",
        what=["unknown key 'python'"],
        where=["environment.python", "tiny.yaml:4"],
        values=["image, environment_variables"],
    ),
    Mistake(
        name="A setting of the job script is the business of hpc_det",
        add="slurm: {sbatch_args: [--nodes=3]}\n",
        what=["slurm.sbatch_args", "--nodes"],
        where=["tiny.yaml:4"],
        values=["'--nodes=3'"],
        remedy=["resources.slots_per_trial"],
    ),
]

# --- the code: told together with the values

CODE = [
    Mistake(
        name="The entrypoint is not given",
        config=WITHOUT_ENTRYPOINT,
        what=["entrypoint", "required"],
        where=["entrypoint"],
        remedy=["--trial model_def:MyTrial"],
    ),
    Mistake(
        name="The class is misspelled",
        config=WITHOUT_ENTRYPOINT + "entrypoint: model_def:MyTrail\n",
        what=["'MyTrail'"],
        where=["HERE/code/model_def.py"],
        values=["MyTrial"],
        remedy=["did you mean 'MyTrial'?"],
    ),
    Mistake(
        name="A dot stands between the module and the class",
        config=WITHOUT_ENTRYPOINT + "entrypoint: model_def.MyTrial\n",
        what=["model_def.MyTrial", "is not a command"],
        where=["entrypoint"],
        remedy=["model_def:MyTrial"],
    ),
    Mistake(
        name="The class is not a trial",
        config=WITHOUT_ENTRYPOINT + "entrypoint: model_def:Net\n",
        files={"code/model_def.py": f"{TRIAL}\nclass Net: ...\n"},
        what=["Net", "is not a trial"],
        where=["HERE/code/model_def.py"],
        remedy=["hpc_det.pytorch.PyTorchTrial"],
    ),
    Mistake(
        name="The entrypoint names a function",
        config=WITHOUT_ENTRYPOINT + "entrypoint: model_def:train\n",
        files={"code/model_def.py": f"{TRIAL}\ndef train(): ...\n"},
        what=["train", "is not a trial"],
        where=["HERE/code/model_def.py"],
        remedy=["hpc_det.pytorch.PyTorchTrial"],
    ),
    Mistake(
        name="A method of the trial is missing",
        files={"code/model_def.py": TRIAL.replace("evaluate_batch", "evaluate")},
        what=["MyTrial", "evaluate_batch"],
        where=["HERE/code/model_def.py"],
        remedy=["define one of them"],
    ),
    Mistake(
        name="The code has a syntax error",
        files={"code/model_def.py": f"{TRIAL}\ndef helper(:\n    pass\n"},
        what=["syntax error", "def helper(:"],
        where=["HERE/code/model_def.py:10"],
        remedy=["correct this line"],
    ),
    Mistake(
        name="The script is misspelled",
        config=WITHOUT_ENTRYPOINT + "entrypoint: python3 trian.py\n",
        files={"code/train.py": ""},
        what=["'trian.py'"],
        where=["context_dir HERE/code"],
        values=["model_def.py, train.py"],
        remedy=["did you mean train.py?"],
    ),
    Mistake(
        name="The launcher is misspelled",
        config=WITHOUT_ENTRYPOINT + LAUNCH.format("torch_distribute"),
        what=["hpc_det.launch.torch_distribute", "no such launcher"],
        where=["entrypoint"],
        values=["torch_distributed, direct, mpi"],
        remedy=["did you mean 'torch_distributed'?"],
    ),
    Mistake(
        name="A launcher of another program is used",
        config=WITHOUT_ENTRYPOINT + LAUNCH.format("torchrun"),
        what=["hpc_det.launch.torchrun", "no such launcher"],
        where=["entrypoint"],
        values=["torch_distributed, direct, mpi"],
    ),
    Mistake(
        name="The code folder is misspelled",
        command="experiment create tiny.yaml cod",
        what=["is not a folder"],
        where=["context_dir", "'HERE/cod'"],
        remedy=["did you mean 'code'?"],
    ),
]

# --- the code and its folder, checked last


def adds_data(user: User) -> None:
    with open(user.writes("code/data.bin", ""), "wb") as file:
        file.truncate(2 * 10**8)


LAST = [
    Mistake(
        name="The code folder contains the data",
        given=adds_data,
        what=["200000000", "data.bin"],
        where=["HERE/code"],
        values=["95 MiB"],
        remedy=[".detignore"],
    ),
    Mistake(
        name="The folder for checkpoints does not exist",
        add="checkpoint_storage: {type: shared_fs, host_path: /no/such/folder}\n",
        what=["checkpoint_storage.host_path"],
        where=["'/no/such/folder'", "this machine"],
        remedy=["this machine and all nodes"],
    ),
    Mistake(
        name="An image is named where no container runtime is",
        add="environment: {image: /torch.sif}\n",
        what=["environment.image", "container runtime"],
        where=["cluster 'local'"],
        values=["'/torch.sif'"],
        remedy=["containers.runtime", "--config environment.image="],
    ),
    Mistake(
        name="The weights come from an experiment that does not exist",
        command=config("searcher.source_trial_id=3/1"),
        what=["experiment 3", "not found"],
        where=["searcher.source_trial_id", "HERE/states"],
        remedy=["hpc-det experiment list"],
    ),
    Mistake(
        name="The weights come from a checkpoint that does not exist",
        command=config("searcher.source_checkpoint_uuid=abcd"),
        what=["'abcd'"],
        where=["searcher.source_checkpoint_uuid", "HERE/states"],
        remedy=["hpc-det experiment list-checkpoints"],
    ),
    Mistake(
        name="Optuna is not installed",
        config="entrypoint: model_def:MyTrial\n"
        "searcher: {name: optuna, metric: accuracy, max_length: 10, max_trials: 4}\n"
        "hyperparameters: {rate: {type: double, minval: 0, maxval: 1}}\n",
        given=lambda user: user.patch.setattr("hpc_det.submit.submission.find_spec", lambda name: None),
        what=["optuna", "not installed"],
        where=["searcher.name", sys.executable],
        remedy=["-m pip install 'hpc_det[optuna]'"],
    ),
    Mistake(
        name="The library of an object store is not installed",
        add="checkpoint_storage: {type: s3, bucket: models}\n",
        given=lambda user: user.patch.setattr("hpc_det.submit.submission.find_spec", lambda name: None),
        what=["'s3'", "s3fs"],
        where=["checkpoint_storage.type", sys.executable],
        remedy=["-m pip install 'hpc_det[s3]'"],
    ),
    Mistake(
        name="The state folder is a file",
        given=lambda user: user.writes("states", ""),
        code=1,
        what=["Not a directory"],
        where=["HERE/states/experiments"],
        remedy=["HPC_DET_ROOT"],
    ),
]

# --- no error, but a note

NOTES = [
    Mistake(
        name="The module is misspelled",
        command="config check tiny.yaml code",
        code=0,
        config=WITHOUT_ENTRYPOINT + "entrypoint: modle_def:MyTrial\n",
        what=["note", "'modle_def'"],
        where=["context_dir HERE/code"],
        values=["contains model_def.py"],
        remedy=["did you mean model_def?"],
    ),
    Mistake(
        name="The slots cannot share a batch equally",
        command="config check tiny.yaml code",
        add="hyperparameters: {global_batch_size: 33}\nresources: {slots_per_trial: 2}\n",
        code=0,
        what=["note", "not a multiple"],
        where=["hyperparameters.global_batch_size", "resources.slots_per_trial"],
        values=[33, 2],
        remedy=["use 32 or 34"],
    ),
    Mistake(
        name="A mounted folder does not exist",
        command="config check tiny.yaml code --cluster atlas",
        code=0,
        files={PROFILE: f"{SITE}containers: {{runtime: apptainer}}\n"},
        add="environment: {image: /torch.sif}\nbind_mounts: [{host_path: /no/such/folder, container_path: /data}]\n",
        what=["note", "bind_mounts[0].host_path", "does not exist"],
        where=["this machine"],
        values=["'/no/such/folder'"],
        remedy=["check that it exists on the nodes"],
    ),
    Mistake(
        name="A search has nothing to search",
        command="config check tiny.yaml code",
        config="entrypoint: model_def:MyTrial\n"
        "searcher: {name: random, metric: accuracy, max_length: 10, max_trials: 4}\n"
        "hyperparameters: {rate: 0.1}\n",
        code=0,
        what=["note", "random", "no hyperparameter is a range"],
        where=["searcher.name"],
        values=["4 trials"],
        remedy=["{type: double, minval: 0, maxval: 1}", "name: single"],
    ),
    Mistake(
        name="The metric is misspelled",
        command="config check tiny.yaml code",
        files={
            "code/model_def.py": TRIAL.replace(
                "evaluate_batch(self, batch): ...", "evaluate_batch(self, batch): return {'accurracy': 1.0}"
            )
        },
        code=0,
        what=["note", "searcher.metric"],
        where=["MyTrial"],
        values=["'accuracy'", "['accurracy']"],
        remedy=["did you mean 'accurracy'?"],
    ),
    Mistake(
        name="The program of a hook does not exist",
        command="config check tiny.yaml code",
        add="notify: [{command: [./tell.sh]}]\n",
        code=0,
        what=["note", "notify[0].command"],
        where=["HERE/code/tell.sh"],
        values=["'./tell.sh'"],
    ),
    Mistake(
        name="The program of a hook is not executable",
        command="config check tiny.yaml code",
        add="notify: [{command: [./tell.sh]}]\n",
        files={"code/tell.sh": "exit\n"},
        code=0,
        what=["note", "notify[0].command", "not executable"],
        where=["HERE/code/tell.sh"],
        remedy=["chmod +x"],
    ),
    Mistake(
        name="A section of another scheduler is set",
        command="config check tiny.yaml code --cluster pbs",
        add="slurm: {sbatch_args: [--exclusive]}\n",
        code=0,
        what=["note", "no effect"],
        where=["slurm.sbatch_args"],
        values=["the scheduler is pbs"],
    ),
]

# --- the cluster and the template

SITES = [
    Mistake(
        name="The cluster is misspelled",
        command=f"{CREATE} --cluster slrum",
        what=["'slrum'"],
        where=["cluster"],
        values=["local, pbs, slurm"],
        remedy=["did you mean 'slurm'?"],
    ),
    Mistake(
        name="A key of the cluster profile is misspelled",
        command=ON_ATLAS,
        files={PROFILE: SITE + "slots_per_nod: 4\n"},
        what=["unknown key 'slots_per_nod'"],
        where=["cluster.slots_per_nod", "cluster 'atlas'"],
        remedy=["did you mean 'slots_per_node'?"],
    ),
    Mistake(
        name="A key of the cluster profile is not given",
        command=ON_ATLAS,
        files={PROFILE: "name: atlas\nscheduler: slurm\nslot_type: gpu\n"},
        what=["required"],
        where=["cluster.slots_per_node"],
        values=["a whole number >= 1"],
    ),
    Mistake(
        name="A profile for PBS has a key of Slurm",
        command=ON_ATLAS,
        files={PROFILE: SITE.replace("slurm", "pbs") + "qos: high\n"},
        what=["cluster.qos"],
        where=["cluster 'atlas'"],
        values=["'high'", "PBS"],
        remedy=["remove it"],
    ),
    Mistake(
        name="The profile names a container runtime that hpc_det does not know",
        command=ON_ATLAS,
        files={PROFILE: f"{SITE}containers: {{runtime: docker}}\n"},
        what=["cluster.containers.runtime"],
        where=["cluster 'atlas'"],
        values=["'docker'", "apptainer, podman or pyxis"],
    ),
    Mistake(
        name="The partition is misspelled",
        command=ON_ATLAS,
        add="resources: {resource_pool: gpus}\n",
        files={PROFILE: SITE},
        what=["resources.resource_pool", "'gpus'"],
        where=["cluster 'atlas'"],
        values=["gpu, large"],
        remedy=["did you mean 'gpu'?"],
    ),
    Mistake(
        name="A trial wants more slots than the partition has",
        command=ON_ATLAS,
        add="resources: {slots_per_trial: 16}\n",
        files={PROFILE: SITE},
        what=["resources.slots_per_trial"],
        where=["cluster 'atlas'"],
        values=[16, "2 nodes of 4 slots"],
        remedy=["at most 8"],
    ),
    Mistake(
        name="A trial wants a part of its last node",
        command=ON_ATLAS,
        add="resources: {slots_per_trial: 6}\n",
        files={PROFILE: SITE},
        what=["resources.slots_per_trial"],
        where=["cluster 'atlas'"],
        values=[6, "4 slots"],
        remedy=[4, 8],
    ),
    Mistake(
        name="A trial wants more slots than this machine has",
        add="resources: {slots_per_trial: 64}\n",
        what=["resources.slots_per_trial"],
        where=["cluster 'local'"],
        values=[64, "1 node "],
        remedy=["at most"],
    ),
    Mistake(
        name="The time limit is longer than the partition allows",
        command=ON_ATLAS,
        add="resources: {time_limit: 3-00:00:00}\n",
        files={PROFILE: SITE},
        what=["resources.time_limit"],
        where=["pool 'gpu' of cluster 'atlas'"],
        values=["'3-00:00:00'", "'24:00:00'"],
        remedy=["ask for less, or choose another pool"],
    ),
    Mistake(
        name="The template is misspelled",
        command=f"{CREATE} --template smal",
        what=["'smal'"],
        where=["template"],
        values=["known: small"],
        remedy=["did you mean 'small'?"],
    ),
    Mistake(
        name="A template names a template",
        command=f"{CREATE} --template mine",
        files={"states/conf/template/mine.yaml": "template: small\n"},
        what=["cannot use another template"],
        where=["template 'mine'"],
        values=["'small'"],
        remedy=["copy what it needs"],
    ),
    Mistake(
        name="A key of the template is misspelled",
        command=f"{CREATE} --template mine",
        files={"states/conf/template/mine.yaml": "max_restart: 3\n"},
        what=["unknown key 'max_restart'"],
        where=["template 'mine'"],
        remedy=["did you mean 'max_restarts'?"],
    ),
    Mistake(
        name="A template that exists is created",
        command="template create mine tiny.yaml",
        config="max_restarts: 3\n",
        files={"states/conf/template/mine.yaml": "max_restarts: 4\n"},
        what=["already exists"],
        where=["template 'mine'"],
        remedy=["hpc-det template set mine tiny.yaml"],
    ),
]

# --- the command line

COMMANDS = [
    Mistake(
        name="A command is misspelled",
        command="experimnt list",
        what=["No such command 'experimnt'"],
        where=["hpc-det"],
        remedy=["did you mean 'experiment'?"],
    ),
    Mistake(
        name="The group of a command is left out",
        command="describe 1",
        what=["No such command 'describe'"],
        where=["hpc-det"],
        remedy=["did you mean `hpc-det experiment describe`?"],
    ),
    Mistake(
        name="A command of a group is misspelled",
        command="experiment creat tiny.yaml",
        what=["No such command 'creat'"],
        where=["hpc-det experiment"],
        remedy=["did you mean 'create'?"],
    ),
    Mistake(
        name="An option is misspelled",
        command=f"{CREATE} --folow",
        what=["'--folow'"],
        where=["hpc-det experiment create"],
        remedy=["'--follow'"],
    ),
    Mistake(
        name="An override has no equals sign",
        command=config("resources.slots_per_trial"),
        what=["resources.slots_per_trial"],
        where=["--config"],
        remedy=["KEY=VALUE", "resources.slots_per_trial=2"],
    ),
    Mistake(
        name="An override sets a key below a value",
        command=config("name.first=tiny"),
        what=["name", "not a map"],
        where=["--config name.first"],
        values=["'tiny'"],
        remedy=["set name itself"],
    ),
    Mistake(
        name="The key of an override is misspelled",
        command=config("max_restart=3"),
        what=["unknown key 'max_restart'"],
        where=["--config max_restart"],
        remedy=["did you mean 'max_restarts'?"],
    ),
    Mistake(
        name="An override is no YAML",
        command=config("searcher={metric: accuracy"),
        what=["a bracket is not closed"],
        where=["--config searcher"],
        remedy=["with }"],
    ),
    Mistake(
        name="Options contradict each other",
        command=f"{CREATE} --paused --follow",
        what=["nothing trains"],
        where=["--paused"],
        remedy=["remove --follow", "hpc-det experiment activate"],
    ),
    Mistake(
        name="A file to include does not exist",
        command=f"{CREATE} --include weights.pt",
        what=["does not exist"],
        where=["--include"],
        values=["'weights.pt'"],
    ),
    Mistake(
        name="The group to share with is not the user's",
        command=f"{CREATE} --shared=no-such-group",
        what=["you are not in this group"],
        where=["--shared=no-such-group"],
        remedy=["--shared=GROUP"],
    ),
    Mistake(
        name="The command for Hydra overrides gets a file",
        command="run line/line.yaml",
        what=["'line/line.yaml'", "is not an override"],
        where=["line/line.yaml"],
        remedy=["hpc-det experiment create line/line.yaml"],
    ),
    Mistake(
        name="A Hydra override has no equals sign",
        command=f"{RUN} max_restarts",
        what=["'max_restarts'", "is not an override"],
        where=["max_restarts"],
        remedy=["KEY=VALUE"],
    ),
    Mistake(
        name="A Hydra override has a bracket without quotes",
        command=f"{RUN} 'name=tiny(1'",
        what=["is not an override"],
        where=["'name=tiny(1'"],
        remedy=["in quotes"],
    ),
    Mistake(
        name="A Hydra override has several values without a sweep",
        command=f"{RUN} hyperparameters.learning_rate=0.1,0.01",
        what=["Ambiguous value"],
        where=["hyperparameters.learning_rate=0.1,0.01"],
        remedy=["KEY=[a,b]", "-m"],
    ),
    Mistake(
        name="A Hydra override sets a key that is not there",
        command=f"{RUN} hyperparameters.rate=0.1",
        what=["no such key"],
        where=["hyperparameters.rate"],
        remedy=["+hyperparameters.rate=VALUE"],
    ),
    Mistake(
        name="The experiment of a Hydra command line is misspelled",
        command="run experiment=digit",
        what=["'digit'"],
        where=["experiment"],
        values=["known: digits"],
        remedy=["did you mean 'digits'?"],
    ),
    Mistake(
        name="A group of a Hydra command line is misspelled",
        command="run experimen=digits",
        what=["unknown key 'experimen'"],
        where=["experimen"],
        remedy=["did you mean 'experiment'?"],
    ),
]

# --- experiments that exist, and those that do not


def saves_a_damaged_checkpoint(user: User) -> None:
    life = user.has_trained()
    checkpoint = life.saves(400, uuid="1f0c1f0c-0000-4000-8000-000000000000")
    (checkpoint.path / "state_dict.pth").write_bytes(b"WEIGHTS")


def saves_a_checkpoint(user: User) -> None:
    user.has_trained().saves(400, uuid="1f0c1f0c-0000-4000-8000-000000000000")


EXPERIMENTS = [
    *(
        Mistake(
            name=f"{command} is told of an experiment that does not exist",
            command=f"experiment {command} 7",
            given=given,
            what=["experiment 7", "not found"],
            where=["HERE/states"],
            values=[values],
            remedy=["hpc-det experiment list"],
        )
        for command, given, values in [
            ("activate", None, "no experiment"),
            ("continue", User.has_trained, "the newest is 1"),
            ("fork", User.has_trained, "the newest is 1"),
            ("logs", User.has_trained, "the newest is 1"),
        ]
    ),
    Mistake(
        name="An experiment is given by its name",
        command="experiment describe tiny",
        what=["'tiny'", "not an experiment ID"],
        where=["hpc-det experiment describe"],
        values=["a number such as 12"],
        remedy=["12"],
    ),
    Mistake(
        name="A trial does not exist",
        command="trial describe 1/7",
        given=User.trains,
        what=["no trial 7"],
        where=["experiment 1"],
        values=["1 to 1"],
        remedy=["hpc-det experiment list-trials 1"],
    ),
    Mistake(
        name="A trial is given without its experiment",
        command="trial describe 7",
        what=["'7'", "not a trial"],
        where=["hpc-det trial describe"],
        values=["EXPERIMENT/TRIAL"],
        remedy=["7/1 for trial 1 of experiment 7"],
    ),
    Mistake(
        name="A checkpoint is downloaded from a trial without one",
        command="trial download 1/1",
        given=User.has_trained,
        what=["no checkpoint"],
        where=["trial 1/1"],
        remedy=["hpc-det experiment list-checkpoints 1"],
    ),
    Mistake(
        name="The UUID of a checkpoint is wrong",
        command="trial download 1/1 --uuid abcd",
        given=saves_a_checkpoint,
        what=["no match"],
        where=["trial 1/1"],
        values=["--uuid abcd", "1f0c1f0c-0000-4000-8000-000000000000"],
    ),
    Mistake(
        name="A checkpoint that no experiment has is described",
        command="checkpoint describe abcd1234",
        given=saves_a_checkpoint,
        what=["'abcd1234'"],
        where=["HERE/states"],
        remedy=["hpc-det experiment list-checkpoints ID"],
    ),
    Mistake(
        name="A checkpoint is damaged",
        command="trial download 1/1",
        given=saves_a_damaged_checkpoint,
        code=1,
        what=["damaged", "state_dict.pth", "crc32"],
        where=["checkpoint 1f0c1f0c-0000-4000-8000-000000000000"],
        remedy=["hpc-det trial list-checkpoints 1/1"],
    ),
    Mistake(
        name="An experiment that has completed is killed",
        command="experiment kill 1",
        given=User.has_trained,
        what=["already ended"],
        where=["experiment 1"],
        values=["COMPLETED"],
    ),
    Mistake(
        name="An experiment that runs is activated",
        command="experiment activate 1",
        given=User.trains,
        what=["only a paused experiment"],
        where=["experiment 1"],
        values=["RUNNING"],
        remedy=["hpc-det experiment logs -f 1"],
    ),
    Mistake(
        name="An experiment that has completed is activated",
        command="experiment activate 1",
        given=User.has_trained,
        what=["only a paused experiment"],
        where=["experiment 1"],
        values=["COMPLETED"],
        remedy=["hpc-det experiment fork 1"],
    ),
    Mistake(
        name="An experiment that runs is continued",
        command="experiment continue 1",
        given=User.trains,
        what=["wait for its end"],
        where=["experiment 1"],
        values=["RUNNING"],
        remedy=["hpc-det experiment kill 1"],
    ),
    Mistake(
        name="An experiment that runs is deleted",
        command="experiment delete 1 --yes",
        given=User.trains,
        what=["RUNNING"],
        where=["experiment 1"],
        remedy=["hpc-det experiment kill 1"],
    ),
    Mistake(
        name="An experiment is deleted by a script that cannot confirm it",
        command="experiment delete 1",
        given=User.has_trained,
        what=["stdin is not a terminal"],
        where=["experiment 1"],
        remedy=["--yes"],
    ),
    Mistake(
        name="A rank that does not exist has no log",
        command="experiment logs 1 --rank 8",
        given=User.trains,
        what=["--rank 8"],
        where=["experiment 1"],
        values=["0 to"],
    ),
    Mistake(
        name="A time of logs is a word",
        command="experiment logs 1 --since yesterday",
        given=User.trains,
        what=["'yesterday'"],
        where=["--since"],
        values=["2026-11-20T10:00"],
        remedy=["2h"],
    ),
    Mistake(
        name="The logs of an experiment that waits in the queue are shown",
        command="experiment logs 1",
        given=lambda user: user.submits(FakeScheduler([JobState.QUEUED], "Priority")),
        code=0,
        what=["no logs"],
        where=["experiment 1"],
        remedy=["hpc-det experiment logs -f 1", "hpc-det experiment describe 1"],
    ),
]

# --- what a launcher misses, on the node


NODES = [
    Mistake(
        name="mpi4py is not installed",
        given=lambda user: user.patch.setattr("importlib.util.find_spec", lambda name: None),
        command=lambda user: rank_command(["train.py"]),
        what=["mpi4py", "not installed"],
        where=[sys.executable],
        remedy=["-m pip install 'hpc_det[mpi]'"],
    ),
]

# --- Ctrl-C


def interrupt(*_: object) -> JobState:
    raise KeyboardInterrupt


INTERRUPTED = [
    Mistake(
        name="Ctrl-C while the code is copied",
        given=lambda user: user.patch.setattr("hpc_det.submit.snapshot._copy", interrupt),
        code=130,
        what=["interrupted"],
        where=["experiment 1"],
        values=["before a job was queued", "was removed"],
    ),
    Mistake(
        name="Ctrl-C while an experiment is followed",
        command="experiment logs 1 -f",
        given=lambda user: user.submits(FakeScheduler([interrupt])),
        code=130,
        what=["stopped following"],
        where=["experiment 1"],
        values=["continues"],
        remedy=["hpc-det experiment kill 1"],
    ),
    Mistake(
        name="Ctrl-C while an experiment is waited for",
        command="experiment wait 1",
        given=lambda user: user.submits(FakeScheduler([interrupt])),
        code=130,
        what=["stopped waiting"],
        where=["experiment 1"],
        values=["continues"],
        remedy=["hpc-det experiment kill 1"],
    ),
]

# --- the scheduler: these start its commands


def says(command: str, text: str, code: int = 1) -> Callable[[User], object]:
    return lambda user: user.stub(command, f"echo '{text}' >&2; exit {code}")


def has_a_silent_slurm(user: User) -> None:
    for command in ("sinfo", "scontrol"):
        says(command, "slurm_load_partitions: Unable to contact slurm controller (connect failure)")(user)


def refuses_the_queue(user: User) -> None:
    user.stub("qstat", "echo pbs_version = 23.06.06")
    user.stub("qsub", "echo qsub: Unknown queue >&2; exit 170")


def without_schedulers(user: User) -> None:
    user.stub("bash", 'exec /bin/bash "$@"')
    user.patch.setenv("PATH", str(user.here / "stubs"))


ON_SLURM = f"{CREATE} --cluster slurm"
SCHEDULERS = [
    Mistake(
        name="sbatch is not on the PATH",
        command=ON_SLURM,
        given=without_schedulers,
        code=1,
        what=["sbatch", "not found"],
        where=["PATH"],
        remedy=["a login node", "--cluster local"],
    ),
    Mistake(
        name="The commands of PBS are not on the PATH",
        command=f"{CREATE} --cluster pbs",
        given=without_schedulers,
        code=1,
        what=["qstat", "not found"],
        where=["PATH"],
        remedy=["a login node", "--cluster local"],
    ),
    Mistake(
        name="Slurm refuses the account",
        command=ON_SLURM,
        given=says(
            "sbatch",
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
        ),
        code=1,
        what=["Invalid account or account/partition combination specified"],
        where=["the scheduler refused the job"],
        remedy=["`account` in the cluster profile"],
    ),
    Mistake(
        name="Slurm refuses the QOS",
        command=ON_SLURM,
        given=says("sbatch", "sbatch: error: Batch job submission failed: Invalid qos specification"),
        code=1,
        what=["Invalid qos specification"],
        where=["the scheduler refused the job"],
        remedy=["`qos` in the cluster profile"],
    ),
    Mistake(
        name="Slurm has no such partition",
        command=ON_SLURM,
        given=says("sbatch", "sbatch: error: invalid partition specified: gpus"),
        code=1,
        what=["invalid partition specified"],
        where=["the scheduler refused the job"],
        values=["gpus"],
        remedy=["resources.resource_pool"],
    ),
    Mistake(
        name="PBS has no such queue",
        command=f"{CREATE} --cluster pbs",
        given=refuses_the_queue,
        code=1,
        what=["Unknown queue"],
        where=["the scheduler refused the job"],
        remedy=["resources.resource_pool"],
    ),
    Mistake(
        name="Slurm does not answer",
        command="job list",
        given=has_a_silent_slurm,
        code=1,
        what=["Unable to contact slurm controller"],
        where=["scontrol"],
        remedy=["try again later"],
    ),
]

ALL = [*FILES, *VALUES, *CODE, *LAST, *NOTES, *SITES, *COMMANDS, *EXPERIMENTS, *NODES, *INTERRUPTED, *SCHEDULERS]


@pytest.fixture
def user(tmp_path: Path, root: Path, hpc_det: Command, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.chdir(tmp_path)
    return User(tmp_path, root, hpc_det, monkeypatch, stub)


def rows(mistakes: list[Mistake], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(mistake, id=mistake.name, marks=marks) for mistake in mistakes]


@pytest.mark.parametrize("mistake", [*rows(ALL[: -len(SCHEDULERS)]), *rows(SCHEDULERS, pytest.mark.integration)])
def test_the_message_names(user: User, mistake: Mistake) -> None:
    result = mistake.is_made_by(user)
    assert result.code == mistake.code, result
    assert mistake.code == 0 or result.out == ""
    assert "Traceback" not in result.err
    mistake.is_explained(result.err if mistake.code else result.out + result.err, user.here)


@pytest.mark.parametrize("mistake", rows([*VALUES, *CODE]))
def test_two_mistakes_are_told_together(user: User, mistake: Mistake) -> None:
    both = replace(mistake, command=f"{mistake.command} --config {ANOTHER}=0")
    result = both.is_made_by(user)
    assert result.code == 2
    both.is_explained(result.err, user.here)
    assert unnamed(result.err, f"--config {ANOTHER}", 0, "a whole number >= 1") == []


def test_the_table_has_each_mistake_once() -> None:
    names = [mistake.name for mistake in ALL]
    assert len(names) == len({*names}) >= 100
