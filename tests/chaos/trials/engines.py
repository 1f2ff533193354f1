"""Trials with engines: ZeRO of every stage, and a pipeline of two stages."""

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from disturb import Disturber, Hooks
from model_def import WIDTH, Records
from torch import nn

from hpc_det.pytorch import DataLoader
from hpc_det.pytorch.deepspeed import DeepSpeedTrial


class WithData(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.hparams = context.get_hparams()
        self.disturb = Disturber(context)

    def build_callbacks(self):
        return {"hooks": Hooks(self.context, self.disturb)}

    def build_training_data_loader(self):
        return self.loader(self.hparams["records"], shuffle=self.hparams["data"] == "shuffled")

    def build_validation_data_loader(self):
        return self.loader(24)

    def loader(self, count, **options):
        workers = self.hparams["workers"]
        return DataLoader(Records(count, self.noisy), batch_size=self.micro, num_workers=workers, **options)

    micro = 3
    noisy = True

    def config(self):
        of_stage_3 = {"stage3_param_persistence_threshold": self.hparams["persistence"]}
        stage = self.hparams["stage"]
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.hparams["accumulation"],
            "gradient_clipping": 0.5 if self.hparams["clips"] else 0.0,
            "zero_optimization": {"stage": stage, **(of_stage_3 if stage == 3 else {})},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 12, "warmup_max_lr": 0.02}},
            "bf16": {"enabled": self.hparams["bf16"]},
            "steps_per_print": 10**9,
        }


class EngineTrial(WithData):
    """A trial with one engine. Every size is divisible by two ranks, since the padding of ZeRO-3's shards is
    uninitialised memory.
    """

    def __init__(self, context):
        super().__init__(context)
        norm = nn.LayerNorm(16) if self.hparams["bf16"] else nn.BatchNorm1d(16)
        layers = [nn.Linear(WIDTH, 16), norm, nn.Tanh(), nn.Dropout(self.hparams["dropout"])]
        model = nn.Sequential(*layers, nn.Linear(16, 1, bias=False))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=self.config())
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.disturb.batch = batch_idx
        loss = self.loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        self.disturb("batch")
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        self.disturb("validation")
        return {"loss": self.loss(dataloader_iter)}

    def loss(self, batches):
        inputs, targets = self.context.to_device(next(batches))
        kind = next(self.engine.module.parameters()).dtype
        return nn.functional.mse_loss(self.engine(inputs.to(kind)).float(), targets)


class PipedTrial(WithData):
    def __init__(self, context):
        super().__init__(context)
        dropout = self.hparams["dropout"]
        layers = [LayerSpec(nn.Linear, WIDTH, 8), nn.ReLU(), nn.Dropout(dropout), LayerSpec(nn.Linear, 8, 8), nn.ReLU()]
        module = PipelineModule([*layers, LayerSpec(nn.Linear, 8, 1)], num_stages=2, loss_fn=nn.MSELoss())
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=self.config())
        context.wrap_model_engine(self.engine)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.disturb.batch = batch_idx
        loss = self.engine.train_batch(dataloader_iter)
        self.disturb("batch")
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        self.disturb("validation")
        return {"loss": self.engine.eval_batch(dataloader_iter)}
