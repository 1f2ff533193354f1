"""Batch inference: a network that the digits experiment has trained classifies all 1797 images."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from hpc_det.pytorch import TorchBatchProcessor, load_trial_from_checkpoint_path, torch_batch_process


class Digits(TorchBatchProcessor):
    def __init__(self, context):
        self.context = context
        checkpoint = context.get_hparams()["checkpoint"]
        self.model = context.prepare_model_for_inference(load_trial_from_checkpoint_path(checkpoint).model)
        self.accuracy = context.wrap_reducer(accuracy, name="accuracy")
        context.report_task_using_checkpoint(checkpoint)

    def process_batch(self, batch, batch_idx):
        images, labels = self.context.to_device(batch)
        with torch.inference_mode():
            probabilities = self.model(images).softmax(dim=1)
        digits = probabilities.argmax(dim=1)
        self.accuracy.update((digits == labels).cpu())
        return {"digit": digits, "probability": probabilities.max(dim=1).values}


def accuracy(batches):
    return torch.cat(batches).float().mean().item()


def images():
    data = load_digits()
    return TensorDataset(torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target))


if __name__ == "__main__":
    torch_batch_process(Digits, images(), batch_size=32, checkpoint_interval=10)
