"""A line that is fitted by several workers, with the parts of RaySGD that most programs use. Prints facts as JSON."""

import argparse
import json
import os
import tempfile

import ray
import torch
from ray.util.sgd import TorchTrainer
from ray.util.sgd.torch import TrainingOperator
from ray.util.sgd.torch.examples.train_example import LinearDataset
from ray.util.sgd.utils import BATCH_SIZE, AverageMeterCollection, override
from torch.utils.data import DataLoader


def hook():
    os.environ["LINE_SLOPE"] = "2"


class LineOperator(TrainingOperator):
    @override(TrainingOperator)
    def setup(self, config):
        data = LinearDataset(int(os.environ["LINE_SLOPE"]), 5, size=40)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizer, criterion=torch.nn.MSELoss(), schedulers=scheduler
        )
        loader = DataLoader(data, batch_size=config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)

    @override(TrainingOperator)
    def train_epoch(self, iterator, info):  # the form of 1.2
        meters = AverageMeterCollection()
        for batch in iterator:
            metrics = self.train_batch(batch, {"batch_idx": 0, "global_step": self.global_step, **info})
            meters.update(metrics, n=metrics.pop("num_samples", 1))
            self.global_step += 1
        self.scheduler.step()
        return meters.summary()


parser = argparse.ArgumentParser()
parser.add_argument("--address")
parser.add_argument("--num-workers", type=int, default=1)
parser.add_argument("--use-gpu", action="store_true")
args = parser.parse_args()

ray.init(address=args.address)
trainer = TorchTrainer(
    training_operator_cls=LineOperator,
    initialization_hook=hook,
    num_workers=args.num_workers,
    use_gpu=args.use_gpu,
    config={"lr": 0.02, BATCH_SIZE: 4 * args.num_workers},
    scheduler_step_freq="epoch",
)
stats = [trainer.train(max_retries=1, info={"epoch_idx": i, "num_epochs": 2}) for i in range(2)]
rates = trainer.apply_all_operators(lambda operator: operator.optimizer.param_groups[0]["lr"])
path = trainer.save(os.path.join(tempfile.mkdtemp(), "line.pt"))
trainer.load(path)
model = trainer.get_model(to_cpu=ray.util.client.ray.is_connected())
print(
    json.dumps(
        {
            "workers": len(trainer.apply_all_workers(os.getpid)),
            "samples": [stat["num_samples"] for stat in stats],
            "is_better": bool(stats[1]["train_loss"] < stats[0]["train_loss"]),
            "rates": rates,
            "validated": trainer.validate()["num_samples"],
            "outputs": model.out_features,
        }
    )
)
trainer.shutdown()
