"""LocalSGD through trainers under torchrun: one model on all ranks, and runs that resume with the same bits."""

from __future__ import annotations

import pytest
import torch
from test_torchrun import EXAMPLES, torchrun

import laconic
from laconic.collective import local_trainers

TRAINERS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"}

RUN = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
folder, resumed = Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
options = dict(every=4, codec="ef|topk:0.1|qsgd:4", outer="mean")

def write(model, local):
    state = {"model": model.state_dict(), "steps": local.steps}
    torch.save(state, folder / f"final{dist.get_rank()}.pt")
"""

TRANSFORMERS = (
    RUN
    + """
from local_transformers import Classifier, LargestOfTen, Trainer, TrainingArguments, local_trainer

arguments = TrainingArguments(
    str(folder), per_device_train_batch_size=32, max_steps=20, use_cpu=True, report_to=[], save_steps=10,
    disable_tqdm=True, learning_rate=0.01,
)
trainer = Trainer(Classifier(), arguments, train_dataset=LargestOfTen(), eval_dataset=LargestOfTen())
trained = local_trainer(trainer, **options)
trainer.train(resume_from_checkpoint=resumed)
write(trainer.model, trained.local)
"""
)

LIGHTNING = (
    RUN
    + """
from local_lightning import Classifier, DataLoader, TensorDataset, lightning_local, pl

x = torch.randn(640, 64, generator=torch.Generator().manual_seed(0))
data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32)
strategy = lightning_local(**options)
checkpoints = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=10, save_top_k=-1)
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_steps=20, logger=False, callbacks=[checkpoints],
    enable_progress_bar=False, enable_model_summary=False,
)
model = Classifier()
trainer.fit(model, data, ckpt_path=resumed)
write(model, strategy.local)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_example_exchanges_updates(name):
    pytest.importorskip(TRAINERS[name], reason=f"no {name}")
    last = torchrun(EXAMPLES / f"local_{name}.py").strip().splitlines()[-1]
    steps, kilobytes = (float(word) for word in last.replace(" kB each", "").split(" steps, "))
    assert steps == (16 if name == "accelerate" else 20)  # Accelerate accumulates the gradients of two batches a step
    assert kilobytes < 5  # of 76 without compression


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, script, checkpoint",
    [("transformers", TRANSFORMERS, "checkpoint-10"), ("lightning", LIGHTNING, "step=10.ckpt")],
)
def test_resumed_run_ends_with_the_same_bits_on_all_ranks(name, script, checkpoint, tmp_path):
    pytest.importorskip(TRAINERS[name], reason=f"no {name}")
    (tmp_path / "run.py").write_text(script)
    finals = {}
    for run, arguments in (("whole", []), ("resumed", [tmp_path / "whole" / checkpoint])):
        (tmp_path / run).mkdir()
        torchrun(tmp_path / "run.py", EXAMPLES, tmp_path / run, *arguments)
        finals[run] = [torch.load(tmp_path / run / f"final{rank}.pt") for rank in range(2)]
    first = finals["whole"][0]
    for final in (*finals["whole"], *finals["resumed"]):
        assert final["steps"] == 20
        assert all(torch.equal(x, first["model"][key]) for key, x in final["model"].items())
    assert not any(tmp_path.glob("**/*.new"))


def test_weights_by_tokens_raise_config_error():
    with pytest.raises(laconic.ConfigError, match="weight_by needs the tokens of each step"):
        local_trainers.TrainerLocalSGD({"weight_by": "tokens"})


def test_missing_library_raises_config_error():
    with pytest.raises(
        laconic.ConfigError, match=r"no_such_trainer\.pytorch is not installed: pip install no_such_trainer"
    ):
        local_trainers.library("no_such_trainer.pytorch", "neither_this")
