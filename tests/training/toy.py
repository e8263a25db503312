"""A tiny objective and its data, for tests of the training loop; also a program, so that a test can kill it.

python toy.py FOLDER KEY=VALUE ...
"""

import json
import os
import sys
import time
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from longtrain.data.packing.batch import Batch
from longtrain.errors import LongtrainError
from longtrain.methods.spec import Loss, Objective
from longtrain.training.callbacks import Stopped
from longtrain.training.loop import build_trainer, clean, fit
from longtrain.training.optim import Optim
from longtrain.training.settings import LoopConfig

VOCAB, HIDDEN = 19, 8


class Draft(nn.Module):
    """What is trained: an embedding, a layer with a bias, and a norm's vector."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.out = nn.Linear(HIDDEN, VOCAB)
        self.norm = nn.LayerNorm(HIDDEN)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, ids_T):
        return self.out(self.norm(self.embed(ids_T)))


class Frozen(nn.Module):
    """A target that must never be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1000,), 0.5), requires_grad=False)
        self.register_buffer("table", torch.arange(5.0))


class Toy(Objective):
    """Next-token loss; noise from the batch's seed and, when asked, from the process's generators."""

    def __init__(self, module, target=None, *, noise: bool = False, nan_at: int = -1, sleep: float = 0.0):
        super().__init__()
        self.module, self.target = module, target
        self.noise, self.nan_at, self.sleep, self.calls = noise, nan_at, sleep, 0

    def forward(self, batch):
        time.sleep(self.sleep)
        generator = torch.Generator().manual_seed(batch.seed)
        logits_TV = self.module(batch.ids_T[:-1])
        logits_TV = logits_TV + 0.1 * torch.randn(logits_TV.shape, generator=generator)
        if self.noise and self.training:
            logits_TV = logits_TV + 0.1 * torch.randn(logits_TV.shape)
        mask = batch.loss_mask_T[1:]
        labels = batch.ids_T[1:]
        losses_T = nn.functional.cross_entropy(logits_TV, labels, reduction="none")
        total = (losses_T * mask).sum()
        if batch.seed == self.nan_at:
            total = total * float("nan")
        right = ((logits_TV.argmax(-1) == labels) & mask).sum()
        count = mask.sum()
        return Loss(total, int(count), {"acc_1": (right, count), "acc_2": (right * 0, count)})


class TokenBatch(Dataset):
    """Micro-batches as a function of their number; lengths and label counts differ."""

    def __init__(self, n, *, per_step, rank, world, start=0):
        self.n, self.per_step, self.rank, self.world, self.start = n, per_step, rank, world, start

    def __len__(self):
        return self.n // self.world - self.start

    def __getitem__(self, item):
        if item >= len(self):
            raise IndexError(item)
        index = (self.start + item) * self.world + self.rank
        step = index // self.per_step
        labels = sum(int(row(i)[1].sum()) for i in range(step * self.per_step, (step + 1) * self.per_step))
        ids_T, mask_T = row(index)
        return Batch(
            ids_T, (0, len(ids_T)), mask_T, seed=index, tokens_in_step=labels, names=(f"doc{index}",)
        )


def row(index):
    generator = torch.Generator().manual_seed(1000 + index)
    n = int(torch.randint(5, 30, (), generator=generator))
    ids_T = torch.randint(0, VOCAB, (n,), generator=generator)
    ids_T[1::2] = (ids_T[0 : n - 1 : 2] * 3 + 1) % VOCAB
    mask_T = torch.rand(n, generator=generator) < 0.7
    mask_T[0], mask_T[1] = False, True
    return ids_T, mask_T


class Data(lightning.LightningDataModule):
    def __init__(self, steps, per_step, val_sequences=6):
        super().__init__()
        self.steps, self.per_step, self.val_sequences, self.start_batch = steps, per_step, val_sequences, 0

    def _loader(self, n, per_step, start):
        trainer = self.trainer
        rows = TokenBatch(
            n, per_step=per_step, rank=trainer.global_rank, world=trainer.world_size, start=start
        )
        return DataLoader(rows, batch_size=None)

    def train_dataloader(self):
        return self._loader(self.steps * self.per_step, self.per_step, self.start_batch)

    def val_dataloader(self):
        return self._loader(self.val_sequences, self.val_sequences, 0)


def train(
    folder,
    *,
    steps=12,
    per_step=4,
    accumulate=4,
    devices=1,
    strategy="auto",
    resume="auto",
    optim=None,
    facts=None,
    data_steps=None,
    objective=None,
    callbacks=(),
    loggers=(),
    **settings,
):
    """Run the toy; returns (summary, objective)."""
    loop = LoopConfig(
        **{
            "max_steps": steps,
            "accumulate_grad_batches": accumulate,
            "accelerator": "cpu",
            "devices": devices,
            "strategy": strategy,
            "precision": "32-true",
            "val_every": 4,
            "log_every": 3,
            "checkpoint_every_minutes": 0.0,
            **settings,
        }
    )
    objective = objective or Toy(Draft(), Frozen(), noise=True)
    if resume == "never":
        clean(Path(folder))
    trainer = build_trainer(loop, Path(folder), callbacks=callbacks, loggers=loggers)
    summary = fit(
        objective,
        Data(data_steps or steps, per_step),
        trainer,
        optim=optim or Optim(lr=0.01),
        loop=loop,
        folder=Path(folder),
        max_steps=steps,
        facts=facts,
        resume=resume,
        show_progress=False,
        draw_curves=False,
    )
    return summary, objective


def zero_on_cpu(**settings):
    """Lightning's DeepSpeed strategy, without its refusal of a CPU, where the engine itself runs."""
    import deepspeed
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone: nothing is compiled

    class OnCpu(DeepSpeedStrategy):
        root_device = torch.device("cpu", 0)  # DeepSpeed wants an index

        def setup_environment(self):
            DDPStrategy.setup_environment(self)

        def setup_distributed(self):
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    return OnCpu(process_group_backend="gloo", **settings)


def main(words):
    """The toy as a program: FOLDER KEY=JSON ...; exits 1 on an error. `zero={"stage": 2}`: DeepSpeed."""
    folder, *settings = words
    values = {key: json.loads(value) for key, value in (item.split("=", 1) for item in settings)}
    if "zero" in values:
        values["strategy"] = zero_on_cpu(**values.pop("zero"))
    own = {key: values.pop(key) for key in ("sleep", "noise") if key in values}
    try:
        train(folder, objective=Toy(Draft(), Frozen(), **{"noise": True, **own}), **values)
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
    except LongtrainError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def rank(number, port, words):
    """The toy as one of several processes that something else started."""
    os.environ |= {"LOCAL_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
