"""Encoders of images: shapes, dtypes, gradients, state dicts; positions by soft-argmax;
augmentation.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.autograd import gradcheck
from torchvision import models
from torchvision.transforms import v2

from kbf.images.augment import Augment, PixelNoise
from kbf.images.encoders import (
    CNN,
    Backbone,
    Encoder,
    PaperMLP,
    SoftArgmaxCNN,
    as_float,
    soft_argmax,
)
from kbf.runtime.instantiate import build

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "encoder"
MAKE = {
    "cnn": lambda q: CNN(q, 5, (4, 8), dropout=0.3),
    "cnn_batch": lambda q: CNN(q, 5, (4,), kernel=5, norm="batch"),
    "softargmax": lambda q: SoftArgmaxCNN(q, channels=(4,), keypoints=3),
    "softargmax_head": lambda q: SoftArgmaxCNN(
        q, 5, channels=(4, 4), keypoints=3, stride=1, hidden=(6,), norm="group"
    ),
    "mlp": lambda q: PaperMLP(q, (12, 8, 6, 5), dropout=0.3),
    "backbone": lambda q: Backbone(q, "shufflenet_v2_x0_5", 5, size=32),
    "augmented": lambda q: Augment((PixelNoise(0.1),), CNN(q, 5, (4,))),
}


def images(m: int = 4, q: tuple[int, int, int] = (3, 9, 12), seed: int = 0) -> torch.Tensor:
    return torch.randint(
        256, (m, *q), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def make(name: str, q: tuple[int, int, int] = (3, 9, 12)) -> nn.Module:
    torch.manual_seed(0)
    return MAKE[name](q)


@pytest.mark.parametrize("name", MAKE)
def test_every_encoder(name):
    net, x = make(name), images()
    fresh = copy.deepcopy(make(name))
    out = net.train()(x)
    assert out.shape == (4, net.features) and out.dtype == torch.float32
    out.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    net.eval()
    one = net(x)
    assert torch.equal(net(x), one) and torch.equal(net(as_float(x, torch.float64)), one)
    torch.testing.assert_close(
        torch.cat([net(image[None]) for image in x]), one, rtol=1e-4, atol=1e-5
    )
    twin = copy.deepcopy(net)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(fresh.eval()(x), one) and torch.equal(twin(x), one)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(net(x), one)  # a copy of its own
    double = net.double()(x)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), one, rtol=1e-3, atol=1e-4)
    assert net(x[:0]).shape == (0, net.features)


@pytest.mark.parametrize("name", MAKE)
def test_images_of_another_shape_are_refused_in_words(name):
    net = make(name, (3, 36, 48)).eval()
    with pytest.raises(
        ValueError, match=r"images of 1 x 64 x 64, the encoder was built for 3 x 36 x 48"
    ):
        net(images(2, (1, 64, 64)))


@pytest.mark.parametrize("name", ["cnn", "softargmax", "softargmax_head", "mlp"])
def test_gradients(name):
    net = make(name, (1, 4, 4)).double().eval()
    x = as_float(images(2, (1, 4, 4)), torch.float64).requires_grad_()
    assert gradcheck(net, (x,))
    p = next(p for p in net.parameters() if p.ndim > 1)

    def of_parameter(value):
        name = next(n for n, other in net.named_parameters() if other is p)
        return torch.func.functional_call(net, {name: value}, (x.detach(),))

    assert gradcheck(of_parameter, (p.detach().clone().requires_grad_(),))


def test_as_float():
    assert torch.equal(
        as_float(torch.tensor([0, 255], dtype=torch.uint8), torch.float64),
        torch.tensor([0.0, 1.0]).double(),
    )
    noisy = torch.tensor([-0.2, 1.3])
    assert torch.equal(as_float(noisy, torch.float32), noisy)
    with pytest.raises(ValueError, match="not int64"):
        as_float(torch.tensor([0, 255]), torch.float32)


def test_wrong_arguments():
    for wrong, ratio_dim in (
        (lambda: CNN((7,)), "takes images"),
        (lambda: CNN((1, 8, 8), kernel=4), "odd"),
        (lambda: CNN((1, 8, 8), norm="layer"), "group, batch, none"),
        (lambda: SoftArgmaxCNN((1, 8, 8), hidden=(3,)), "features"),
    ):
        with pytest.raises(ValueError, match=ratio_dim):
            wrong()


def test_soft_argmax_is_the_expected_position():
    logits = torch.randn(
        2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    found = soft_argmax(logits).unflatten(1, (3, 2))
    for i in range(2):
        for k in range(3):
            share = logits[i, k].exp() / logits[i, k].exp().sum()
            x = sum(share[r, c] * (-1 + 2 * c / 4) for r in range(4) for c in range(5))
            y = sum(share[r, c] * (-1 + 2 * r / 3) for r in range(4) for c in range(5))
            torch.testing.assert_close(found[i, k], torch.stack([x, y]))
    assert gradcheck(soft_argmax, (logits.requires_grad_(),))


def test_positions_are_learned():
    """A blob on noise: 80 steps of Adam bring the squared error of its position to a fiftieth of
    the variance.
    """
    generator = torch.Generator().manual_seed(0)
    z = 1.6 * torch.rand(128, 2, generator=generator) - 0.8
    axis = torch.linspace(-1, 1, 16)
    x = (-((axis - z[:, :1, None]) ** 2 + (axis[:, None] - z[:, 1:, None]) ** 2) / 0.05).exp()[
        :, None
    ]
    x = x + 0.1 * torch.randn(x.shape, generator=generator)
    torch.manual_seed(0)
    net = SoftArgmaxCNN((1, 16, 16), features=2, channels=(8,), keypoints=4)
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(80):
        optimiser.zero_grad()
        (net(x[:64]) - z[:64]).square().sum(-1).mean().backward()
        optimiser.step()
    with torch.no_grad():
        assert (net(x[64:]) - z[64:]).square().mean() < z.var(0).mean() / 50


def test_published_layers():
    net = PaperMLP((1, 64, 64), dropout=0.5)
    names = [
        f"Dropout {layer.p}"
        if isinstance(layer, nn.Dropout)
        else type(layer).__name__.removeprefix("Parametrized")
        for layer in net.net
    ]
    hidden = ["Linear", "Dropout 0.5", "ReLU"]
    features = ["Linear", "Dropout 0.0", "ReLU"]
    assert names == ["Flatten", *hidden * 2, "BatchNorm1d", *hidden, *features]
    linear = [layer for layer in net.net if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in linear] == [1024, 512, 128, 32] and net.features == 32
    small = PaperMLP((1, 4, 4), (12, 8, 6, 5))
    for _ in range(100):  # each pass is a step of the power iteration
        small(images(3, (1, 4, 4)))
    for layer in small.eval().net:
        if isinstance(layer, nn.Linear):
            torch.testing.assert_close(
                torch.linalg.matrix_norm(layer.weight, 2), torch.tensor(1.0), rtol=1e-3, atol=1e-3
            )


def test_backbone_is_the_classifier_with_a_new_last_layer(tmp_path):
    torch.manual_seed(1)
    theirs = models.get_model("shufflenet_v2_x0_5", weights=None)
    path = tmp_path / "weights.pth"
    torch.save(theirs.state_dict(), path)
    net = Backbone((3, 32, 32), "shufflenet_v2_x0_5", 7, weights=path, freeze=True, size=32)
    theirs.fc = net.net.fc
    x = as_float(images(2, (3, 32, 32)), torch.float32)
    mean, std = (
        torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    expected = theirs.eval()((x - mean) / std)
    torch.testing.assert_close(
        net(x), expected
    )  # frozen: no batch norm of its own batch, from the start
    torch.testing.assert_close(net.eval()(x), expected)
    torch.testing.assert_close(nn.Sequential(net).train()(x), expected)
    assert [n for n, p in net.named_parameters() if p.requires_grad] == [
        "net.fc.weight",
        "net.fc.bias",
    ]
    grey = Backbone((1, 32, 32), "shufflenet_v2_x0_5", 7, weights=path, size=32).eval()
    grey.net.fc = net.net.fc
    torch.testing.assert_close(grey(x[:, :1]), net.eval()(x[:, :1].expand(-1, 3, -1, -1)))
    other = tmp_path / "other.pth"
    torch.save({"conv1.0.weight": torch.zeros(1)}, other)
    with pytest.raises(ValueError, match="cannot be loaded"):
        Backbone((3, 32, 32), "shufflenet_v2_x0_5", weights=other)
    torch.save({"a": torch.zeros(1)}, other)
    with pytest.raises(
        ValueError, match=r"another net: the file lacks conv1.* more and has unknown a"
    ):
        Backbone((3, 32, 32), "shufflenet_v2_x0_5", weights=other)
    other.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be loaded"):
        Backbone((3, 32, 32), "shufflenet_v2_x0_5", weights=other)
    with pytest.raises(ValueError, match=r"no classifier 'resnet17'; it has resnet18"):
        Backbone((3, 32, 32), "resnet17")
    with pytest.raises(ValueError, match="no single linear layer"):
        Backbone((3, 32, 32), "squeezenet1_0")
    with pytest.raises(ValueError, match="1 or 3 channels, not of 2"):
        Backbone((2, 32, 32))


def test_a_checkpoint_replaces_a_file_of_weights_that_is_missing():
    net = Backbone(
        (3, 32, 32), "shufflenet_v2_x0_5", 7, weights="/nowhere/weights.pth", size=32
    ).eval()
    with pytest.raises(ValueError, match=r"no file /nowhere/weights\.pth"):
        net(images(1, (3, 32, 32)))
    state = Backbone((3, 32, 32), "shufflenet_v2_x0_5", 7, size=32).state_dict()
    outer = nn.Sequential(copy.deepcopy(net))
    outer.load_state_dict({f"0.{key}": value for key, value in state.items()})
    assert outer(images(1, (3, 32, 32))).shape == (1, 7)


@pytest.mark.parametrize(
    "name", ["mobilenet_v3_small", "efficientnet_b0", "regnet_y_400mf", "densenet121"]
)
def test_backbones_by_name(name):
    net = Backbone((1, 24, 40), name, 6, size=32).eval()
    with torch.no_grad():
        assert net(images(1, (1, 24, 40))).shape == (1, 6)
    assert net.size == (32, 53)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "convnext_tiny",
        "vgg11",
        "swin_t",
        "vit_b_16",
        "maxvit_t",
        "mnasnet0_5",
        "alexnet",
    ],
)
def test_larger_backbones_by_name(name):
    net = Backbone((1, 24, 40), name, 6).eval()
    with torch.no_grad():
        assert net(images(1, (1, 24, 40))).shape == (1, 6)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations(path):
    config = OmegaConf.create({"data": {"image": [1, 16, 16]}, "encoder": OmegaConf.load(path)})
    net = build(OmegaConf.to_container(config, resolve=True)["encoder"])
    assert isinstance(net, Encoder)
    with torch.no_grad():
        assert net.eval()(images(2, (1, 16, 16))).shape == (2, net.features)


def test_augmentation_is_random_in_training_alone_and_repeats_with_the_seed():
    blur = {
        "_target_": "torchvision.transforms.v2.RandomAffine",
        "degrees": 30,
        "translate": [0.2, 0.2],
    }
    cnn = {"_target_": "kbf.CNN", "q": [3, 9, 12], "features": 5}
    config = {
        "_target_": "kbf.Augment",
        "transforms": [{"_target_": "kbf.PixelNoise", "std": 0.1}, blur],
    }
    net = build(config | {"encoder": cnn}, trust=True)
    with pytest.raises(ValueError, match="trust"):
        build(config)
    x = images()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(net(x))
    assert torch.equal(draws[0], draws[1]) and not torch.allclose(draws[0], draws[2])
    net.eval()
    before = torch.get_rng_state()
    assert torch.equal(net(x), net.encoder(x)) and torch.equal(torch.get_rng_state(), before)
    only = Augment((PixelNoise(0.1),))
    assert only.eval()(x) is x and only.train()(x).dtype == torch.float32
    assert only(x.double()).dtype == torch.float64


@pytest.mark.parametrize(
    "transform",
    [
        PixelNoise(0.1),
        v2.RandomAffine(90, (0.2, 0.2)),
        v2.GaussianBlur(3, (0.1, 5.0)),
        v2.ColorJitter(0.9),
        v2.GaussianNoise(0.0, 0.1),
        v2.RandomErasing(1.0),
    ],
    ids=lambda t: type(t).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_image_gets_draws_of_its_own(transform, dtype):
    x = as_float(images(1), dtype).expand(6, -1, -1, -1)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(Augment((transform,))(x))
    assert (
        torch.equal(results[0], results[1])
        and results[0].dtype == dtype
        and results[0].shape == x.shape
    )
    assert len({image.numpy().tobytes() for image in results[0]}) > 3


def test_pixel_noise_has_its_spread():
    torch.manual_seed(0)
    noise = PixelNoise(0.2)(torch.zeros(50, 1, 20, 20, dtype=torch.float64))
    assert abs(noise.std() - 0.2) < 0.004 and abs(noise.mean()) < 0.006
