"""ResNet-50 on ImageNet with the usual recipe: SGD with momentum, warmup and cosine, label smoothing, bfloat16."""

import math
from pathlib import Path

import torch
from images import Images
from resnet import ResNet
from torch import nn

from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return the weights of convolutions and linear layers with decay, norms and biases without."""
    return [
        {"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in model.parameters() if weight.ndim <= 1], "weight_decay": 0.0},
    ]


def warmup_and_cosine(optimizer: torch.optim.Optimizer, warmup: int, batches: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler to step at every batch: linear for `warmup` of all `batches`, then half a cosine."""

    def factor(batch: int) -> float:
        if batch < warmup:
            return (batch + 1) / warmup
        return (1 + math.cos(math.pi * (batch - warmup) / max(batches - warmup, 1))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def rates(batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reduce the sums (images, loss, correct, correct within five) of all batches and ranks to metrics."""
    images, loss, top1, top5 = torch.stack(batches).sum(dim=0)
    return {"validation_loss": loss / images, "top1": top1 / images, "top5": top5 / images}


class ImageNetTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        context.experimental.use_amp(torch.bfloat16)
        hparams, data = context.get_hparams(), context.get_data_config()
        folder = Path(data["folder"]).expanduser()
        self.training = Images(folder / "train", data["size"], training=True)
        self.validation = Images(folder / "val", data["size"], training=False)
        model = ResNet(len(self.training.classes), hparams["blocks"], hparams["width"])
        self.model = context.wrap_model(model.to(memory_format=torch.channels_last))
        batch_size = context.get_global_batch_size()
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(
                parameter_groups(model, hparams["weight_decay"]),
                lr=hparams["learning_rate"] * batch_size / 256,  # linear scaling (Goyal et al., 2017)
                momentum=0.9,
                nesterov=True,
            )
        )
        epoch = len(self.training) // batch_size  # batches
        context.wrap_lr_scheduler(
            warmup_and_cosine(self.optimizer, hparams["warmup_epochs"] * epoch, hparams["epochs"] * epoch),
            LRScheduler.StepMode.STEP_EVERY_BATCH,
        )
        self.criterion = nn.CrossEntropyLoss(label_smoothing=hparams["label_smoothing"])
        self.rates = context.wrap_reducer(rates, for_training=False)

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(self.training, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return self.loader(self.validation)

    def loader(self, images: Images, **options) -> DataLoader:
        # with one worker at least: the random numbers of augmentation are then the same after a resume
        workers = self.context.get_data_config()["workers"]
        size = self.context.get_per_slot_batch_size()
        return DataLoader(images, size, num_workers=workers, pin_memory=True, persistent_workers=True, **options)

    def train_batch(self, batch, epoch_idx, batch_idx):
        images, classes = batch
        loss = self.criterion(self.model(images), classes)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        images, classes = batch
        scores = self.model(images).float()
        loss = nn.functional.cross_entropy(scores, classes, reduction="sum")
        best = scores.topk(min(5, scores.shape[1])).indices == classes.unsqueeze(1)
        self.rates.update(torch.stack([torch.tensor(len(images)).to(loss), loss, best[:, 0].sum(), best.sum()]))
        return {}
