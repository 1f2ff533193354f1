"""A search over learning rates by population based training, and one over a grid. Prints the best configs as JSON."""

import json
import random

import ray
import torch
from ray import tune
from ray.tune import CLIReporter
from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.utils import merge_dicts
from ray.tune.utils.mock import FailureInjectorCallback
from ray.util.sgd.torch import TorchTrainer, TrainingOperator
from ray.util.sgd.utils import BATCH_SIZE
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


def data_creator(config):
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 3 * x), batch_size=config[BATCH_SIZE])
    return loader, loader


CreatedOperator = TrainingOperator.from_creators(
    model_creator=lambda config: torch.nn.Linear(1, 1),
    optimizer_creator=lambda model, config: torch.optim.SGD(model.parameters(), lr=config["lr"]),
    data_creator=data_creator,
    loss_creator=torch.nn.MSELoss,
    scheduler_creator=lambda optimizer, config: ReduceLROnPlateau(optimizer, mode="min"),
)


def step(trainer, info):
    trained, validated = trainer.train(profile=True), trainer.validate(profile=True)
    trainer.update_scheduler(metric=validated["val_loss"])
    return merge_dicts(trained, validated)


ray.init(address="auto", log_to_driver=True)
arguments = {"training_operator_cls": CreatedOperator, "scheduler_step_freq": "manual", "config": {BATCH_SIZE: 8}}
reporter = CLIReporter()
reporter.add_metric_column("val_loss", "loss")
population = tune.run(
    TorchTrainer.as_trainable(**arguments),
    num_samples=2,
    config={"lr": tune.choice([1e-9, 0.1])},
    stop={"training_iteration": 2},
    max_failures=-1,
    checkpoint_freq=2,
    keep_checkpoints_num=1,
    verbose=2,
    progress_reporter=reporter,
    scheduler=PopulationBasedTraining(
        time_attr="training_iteration",
        metric="val_loss",
        mode="min",
        perturbation_interval=1,
        hyperparam_mutations={"lr": lambda: random.uniform(0.01, 0.1)},
    ),
    callbacks=[FailureInjectorCallback(time_between_checks=90)],
    queue_trials=True,
)
grid = tune.run(
    TorchTrainer.as_trainable(override_tune_step=step, **arguments),
    config={"lr": tune.grid_search([1e-9, 0.1])},
    stop={"training_iteration": 2},
    verbose=0,
)
best = grid.get_best_trial("val_loss", "min")
trainer = TorchTrainer(**{**arguments, "config": {**arguments["config"], **best.config}})
trainer.load(best.checkpoint.value)
print(
    json.dumps(
        {
            "population": len(population.trials),
            "columns": [name for name in population.dataframe() if name == "config/lr"],
            "best": grid.get_best_config(metric="val_loss", mode="min"),
            "is_loaded": bool(abs(trainer.validate()["val_loss"] - best.last_result["val_loss"]) < 1e-6),
        }
    )
)
trainer.shutdown()
