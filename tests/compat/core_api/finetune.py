# The Trainer of Hugging Face with Determined's callback, as a user would write it.
import determined as det
import torch
import transformers
from determined.transformers import DetCallback


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.linear(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x.sum()[None]}


class Waits(transformers.TrainerCallback):
    """Waits at batch 8 of the first attempt until the trial has to stop."""

    def __init__(self, core_context, is_first):
        self.core_context, self.is_first = core_context, is_first

    def on_step_begin(self, args, state, control, **kwargs):
        if self.is_first and state.global_step == 8:
            self.core_context.train.report_metrics("here", 8, {"here": 1})
            while not self.core_context.preempt.should_preempt():
                pass


if __name__ == "__main__":
    with det.core.init() as core_context:
        args = transformers.TrainingArguments(
            output_dir="out",
            max_steps=18,
            per_device_train_batch_size=8,
            logging_steps=4,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        callback = DetCallback(core_context, args, user_data={"note": "mine"})
        is_first = callback.info.latest_checkpoint is None
        trainer = transformers.Trainer(
            model=Net(),
            args=args,
            train_dataset=Data(),
            eval_dataset=Data(),
            callbacks=[Waits(core_context, is_first), callback],
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
