"""Training loops of other packages over placed models: the numbers of one device, also where they go on from a file."""

from __future__ import annotations

from importlib.util import find_spec
from tempfile import mkdtemp

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zoo_packages import declare_torchvision

import shardwise as sw
from shardwise import Shard
from shardwise.testing import mesh as mesh_of

pytestmark = [pytest.mark.zoo, pytest.mark.slow, pytest.mark.sample]
COLUMN, ROW = {"tp": Shard(0)}, {"tp": Shard(1)}
PLAN = {"*.q_proj.weight": COLUMN, "*.o_proj.weight": ROW, "*.up_proj.weight": COLUMN, "*.down_proj.weight": ROW}


def wait():
    if dist.is_initialized():
        dist.barrier()


def by_trainer(folder, place):
    """Of transformers: clipping, accumulation, a scheduler and dropout are part of it."""
    declare_torchvision()
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    ids = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def trainer(steps):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).double()
        place(model, PLAN)
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=steps,
            save_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=1,
            max_grad_norm=0.5,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        return transformers.Trainer(model, arguments, train_dataset=rows)

    trainer(2).train()
    wait()
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    loss = torch.tensor(resumed.evaluate(rows)["eval_loss"], dtype=torch.float32)  # so the loop computes it
    return [loss, *resumed.model.parameters()]


def by_accelerate(folder, place):
    declare_torchvision()
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(8, 6)

    def made():
        torch.manual_seed(0)
        layers = [("up_proj", nn.Linear(6, 8)), ("act", nn.GELU()), ("down_proj", nn.Linear(8, 3))]
        model = nn.Sequential()
        for name, layer in layers:
            model.add_module(name, layer)
        model = nn.Sequential(model.double())
        place(model, {"*.up_proj.*": COLUMN, "*.down_proj.weight": ROW})
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))

    def train(model, optimizer):
        for _ in range(2):
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    train(*made())
    accelerator.save_state(folder)
    wait()
    accelerator._models.clear()
    accelerator._optimizers.clear()
    model, optimizer = made()
    accelerator.load_state(folder)
    train(model, optimizer)
    return [*model.parameters()]


LOOPS = {"transformers": by_trainer, "accelerate": by_accelerate}


def on_mesh(name, folder):
    mesh = mesh_of((2, 2), names=("dp", "tp"))
    tensors = LOOPS[name](folder, lambda model, plan: sw.distribute_module(model, mesh, plan))
    return [t.detach().full_tensor() if isinstance(t, sw.MeshTensor) else t.detach() for t in tensors]


# The process groups of the pool are there, and the loop is right that it does not use them.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_saves_and_goes_on_as_on_one_device(pool, tmp_path, name):
    if find_spec("accelerate") is None or find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install -e '.[zoo]'")
    torch.manual_seed(0)
    expected = LOOPS[name](mkdtemp(dir=tmp_path), lambda *_: None)
    for rank in pool.run(on_mesh, name, mkdtemp(dir=tmp_path), timeout=240):
        for here, there in zip(rank, expected, strict=True):
            tight = {"rtol": 1e-9, "atol": 1e-12} if there.dtype == torch.float64 else {}
            torch.testing.assert_close(here, there.detach(), **tight)
