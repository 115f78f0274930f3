"""Trains models for a few steps in one or two processes; `test_processes` compares the weights.

``python ddp_steps.py cpu|ddp LR FILE`` writes the weights of each model after an epoch.
"""

import sys
import tempfile
from pathlib import Path

import lightning
import torch

from kbf.config.prepare import configure
from kbf.data.dataset import load_data
from kbf.fitted.checkpoint import LAST, read_checkpoint
from kbf.fitted.settings import EncodingSettings
from kbf.fitting import with_shapes
from kbf.images.encoders import CNN
from kbf.images.encodings import Encoding
from kbf.training.encoder_datamodule import Frames
from kbf.training.encoder_stage import fit_encoding
from kbf.training.fit import train

QUIET = ["logger=none", "callbacks=none", "trainer.enable_progress_bar=false", "particles=50"]
# Of five windows processes have three and two; of the last one of an epoch one and none.
TRAINING = {
    **{"epochs": 1, "optimiser": "sgd", "weight_decay": 0, "schedule": "constant"},
    **{"clip": "null", "batch_size": 5, "window": 8, "stride": 5, "validation": 0.2, "burn_in": 1},
}
LEARNED = [f"++model.training.{key}={value}" for key, value in TRAINING.items()]
NUMBERS = ["n_train=140", "data.n_test=20"]
IMAGES = [
    *("data=dsprites", "n_train=100", "data.n_test=20", "data.encoding.epochs=1"),
    *("data.encoding.members=1", "data.encoding.encoder.keypoints=2"),
    *("data.encoding.encoder.kernel=3", "++data.encoding.augment=null"),
]
MODELS = {
    "lstm": [*NUMBERS, "model=lstm"],
    "lstm_feedback": [*NUMBERS, "model=lstm_feedback"],
    "gru": [*NUMBERS, "model=gru"],
    "kbf_tuned": [*NUMBERS, "model=kbf_tuned", "model.training.folds=2"],
    "rkn": [*IMAGES, "model=rkn"],
    "backprop_kf": [*IMAGES, "model=backprop_kf"],
    "lstm_images": [*IMAGES, "model=lstm_images"],
    "gru_images": [*IMAGES, "model=gru_images"],
    "kbf_features_e2e": [*IMAGES, "model=kbf_features_e2e", "model.training.folds=2"],
}
LOSSES = ("linear", "ridge", "split", "ratio")


def weights_of_model(words: list[str], trainer: str, lr: float) -> dict[str, torch.Tensor]:
    """Return the weights of a filter after one epoch of gradient steps of size ``lr``."""
    start = [f"trainer={trainer}", "trainer.accelerator=cpu", "++model.dtype=float64"]
    start += [f"++model.training.lr={lr}", f"++model.training.lr_encoder={lr}"]
    with tempfile.TemporaryDirectory() as folder:
        config = configure("train", [*LEARNED, *words, *start, *QUIET, f"run_dir={folder}"])
        data = load_data(config["data"], trust=True)
        train(with_shapes(config, data), data.train, Path(folder), trust=True)
        path = Path(folder) / LAST
        state = read_checkpoint(path)["state_dict"] if path.exists() else {}
    return {name: each for name, each in state.items() if each.dtype == torch.float64}


def weights_of_encoder(loss: str, trainer: str, lr: float) -> dict[str, torch.Tensor]:
    """Return the weights of encoders in double precision after two steps of size ``lr``."""
    torch.manual_seed(0)
    how = EncodingSettings(
        epochs=1, lr=lr, optimiser="sgd", schedule="constant", batch_size=25, loss=loss, members=2
    )
    encoders = [CNN((1, 8, 8), features=6, channels=(8,)) for _ in range(2)]
    code = Encoding(encoders, 2, how.gaussians).double()
    states = torch.rand(50, 2, dtype=torch.float64)
    images = torch.rand(50, 1, 8, 8, dtype=torch.float64)
    frames = Frames(images, states, torch.arange(50) // 25)
    several = {"strategy": "ddp", "devices": 2} if trainer == "ddp" else {"devices": 1}
    made = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **several,
    )
    fit_encoding(made, {"seed": 0}, code, how, frames)
    return {name: each.detach().clone() for name, each in code.encoders.named_parameters()}


if __name__ == "__main__":
    kind, step, path = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    found = {name: weights_of_model(words, kind, step) for name, words in MODELS.items()}
    found |= {f"encoder, {loss}": weights_of_encoder(loss, kind, step) for loss in LOSSES}
    if found["lstm"]:  # the process that writes checkpoints
        torch.save(found, path)
