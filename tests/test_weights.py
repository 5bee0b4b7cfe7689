"""A ResNet comes with what its weights need, and weights that do not fit it are named."""

import hashlib
import re
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from samples import IMAGENET, http_server
from torchvision.models import Weights, WeightsEnum

from workshop_utils import weights as module
from workshop_utils.checkpoint import WeightsError, load_checkpoint, save_checkpoint
from workshop_utils.weights import load_resnet, resolve_weights, with_new_head

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8))
RESNET18 = torchvision.models.resnet18(num_classes=5).state_dict()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt"


def test_a_checkpoint_gives_its_model_in_eval_mode_with_transform_and_categories(path):
    save_checkpoint(path, arch="resnet18", num_classes=5, state_dict=RESNET18)
    model, transform, categories = load_resnet(str(path))
    assert not model.training
    assert all(torch.equal(RESNET18[name], tensor) for name, tensor in model.state_dict().items())
    image = transform(PHOTO)
    assert image.shape == (3, 224, 224) and image.dtype == torch.float32
    assert torch.equal(image, torchvision.models.ResNet18_Weights.DEFAULT.transforms()(PHOTO))
    assert model(image[None]).shape == (1, len(categories)) == (1, 5)


def test_a_checkpoint_may_ask_for_another_size_to_which_images_are_not_cropped(path):
    save_checkpoint(path, arch="resnet18", num_classes=5, state_dict=RESNET18, size=224)
    square = PHOTO.resize((224, 224))
    expected = torchvision.transforms.functional.normalize(
        torchvision.transforms.functional.to_tensor(square), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    )
    torch.testing.assert_close(load_resnet(path)[1](square), expected)


def test_categories_are_those_that_the_file_names(path, weights):
    assert load_resnet(weights)[2] == load_resnet("sketches")[2] == IMAGENET
    save_checkpoint(path, arch="resnet18", num_classes=5, state_dict=RESNET18, categories=list("abcde"))
    assert load_resnet(path)[2] == list("abcde")


def test_a_thousand_classes_without_names_are_imagenets(path, weights):
    without = load_checkpoint(weights)
    del without["categories"]
    save_checkpoint(path, **without)
    model, _, categories = load_resnet(path)
    assert categories == IMAGENET == model.fc.categories


def test_a_new_head_forgets_the_categories_of_the_old_one(path):
    save_checkpoint(path, arch="resnet18", num_classes=5, state_dict=RESNET18, categories=list("abcde"), size=96)
    model = load_resnet(path)[0]
    assert model.about == {"arch": "resnet18", "size": 96} and model.fc.categories == list("abcde")
    assert with_new_head(model, 2).about == {"arch": "resnet18", "size": 96} and not hasattr(model.fc, "categories")


def test_resnet_v1_has_its_stride_in_the_first_convolution(path):
    state_dict = torchvision.models.resnet50(num_classes=5).state_dict()
    answers = {}
    for v1 in (False, True):
        save_checkpoint(path, arch="resnet50", num_classes=5, state_dict=state_dict, stride_in_1x1=v1)
        model, transform, _ = load_resnet(path)
        blocks = [layer[0] for layer in (model.layer2, model.layer3, model.layer4)]
        strides = {(block.conv1.stride, block.conv2.stride) for block in blocks}
        assert strides == {((2, 2), (1, 1)) if v1 else ((1, 1), (2, 2))}
        answers[v1] = model(transform(PHOTO)[None])
    assert answers[True].shape == answers[False].shape and not torch.allclose(answers[True], answers[False])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "arch.*num_classes.*state_dict"),
        ({"arch": "vgg11", "num_classes": 5, "state_dict": RESNET18}, "vgg11"),
        ({"arch": "resnet34", "num_classes": 5, "state_dict": RESNET18}, "resnet34.*layer1.2.conv1"),
        ({"arch": "resnet18", "num_classes": 5, "state_dict": [1, 2]}, "resnet18"),
        ({"arch": "resnet18", "num_classes": 5, "state_dict": RESNET18, "categories": ["a"]}, "categories"),
        ({"arch": "resnet18", "num_classes": 5, "state_dict": RESNET18, "categories": "abcde"}, "list of names"),
        ({"arch": "resnet18", "num_classes": 5, "state_dict": RESNET18, "size": 0}, "size 0"),
        (torch.ones(3), "Tensor"),
    ],
)
def test_a_file_that_holds_something_else_is_named_with_the_reason(path, content, reason):
    torch.save(content, path)
    with pytest.raises(WeightsError, match=f"(?s){path}.*{reason}"):
        load_resnet(path)


def test_a_missing_file_is_named_with_the_cure(path):
    with pytest.raises(WeightsError, match=f"'{path}'.*WORKSHOP_WEIGHTS"):
        load_resnet(path)


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        ("module.{}", ["module."]),
        ("_orig_mod.{}", ["_orig_mod."]),
        ("_orig_mod.module.{}", ["module.", "_orig_mod."]),
    ],
)
@pytest.mark.parametrize("bare", [False, True])
def test_weights_of_a_wrapped_model_are_named_with_the_cure(path, wrapped, words, bare):
    content = {"arch": "resnet18", "num_classes": 5}
    state_dict = {wrapped.format(name): weight for name, weight in RESNET18.items()}
    save_checkpoint(path, **state_dict if bare else {**content, "state_dict": state_dict})
    with pytest.raises(WeightsError, match=f"'{path}'.*" + ".*".join(map(re.escape, words))) as caught:
        load_resnet(path)
    cure = re.search(r"save (\{.*\}) as state_dict", str(caught.value))[1]
    save_checkpoint(path, **content, state_dict=eval(cure, {"state_dict": state_dict}))
    assert torch.equal(load_resnet(path)[0].conv1.weight, RESNET18["conv1.weight"])


def test_a_new_head_is_drawn_from_torchs_seed_and_the_rest_is_kept():
    def weights_with_seed(seed):
        model = torchvision.models.resnet18(num_classes=5)
        model.load_state_dict(RESNET18)
        torch.manual_seed(seed)
        return with_new_head(model, 12).state_dict()

    first, again, other = (weights_with_seed(seed) for seed in (1, 1, 2))
    assert first["fc.weight"].shape == (12, 512) and torch.equal(first["fc.weight"], again["fc.weight"])
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert all(torch.equal(first[name], RESNET18[name]) for name in RESNET18 if not name.startswith("fc."))


def test_a_name_given_comes_before_the_environment_and_that_before_torchvision(monkeypatch, weights):
    monkeypatch.setenv("WORKSHOP_WEIGHTS", weights)
    assert resolve_weights("sketches") == "sketches"
    assert resolve_weights("imagenet") == "imagenet"
    assert resolve_weights("auto") == weights
    assert load_resnet("auto")[0].fc.out_features == 1000
    monkeypatch.setenv("WORKSHOP_WEIGHTS", "")
    assert resolve_weights("auto") == "imagenet"


def test_a_relative_path_of_weights_is_the_one_of_this_process(monkeypatch, tmp_path, weights):
    monkeypatch.chdir(Path(weights).parent)
    monkeypatch.setenv("HOME", str(Path(weights).parent))
    name = Path(weights).name
    for given in (name, f"./{name}", Path(name), f"~/{name}"):
        monkeypatch.setenv("WORKSHOP_WEIGHTS", str(given))
        assert resolve_weights(given) == resolve_weights() == resolve_weights("") == weights
        assert load_resnet(given)[0].fc.out_features == 1000
    assert resolve_weights(Path("sketches")) == f"{Path.cwd()}/sketches"


@pytest.mark.parametrize("weights", ["auto", "imagenet"])
def test_photos_never_get_the_weights_for_sketches(monkeypatch, tmp_path, weights):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no network, on any machine
    with pytest.raises(WeightsError, match="(?s)network.*https_proxy.*WORKSHOP_WEIGHTS"):
        load_resnet(weights)


def test_the_weights_for_sketches_ask_no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it looks for a host"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it connects"))
    assert load_resnet("sketches")[0].fc.out_features == 1000


@pytest.fixture(autouse=True)
def todays_proxy():
    urllib.request.install_opener(None)  # urllib reads the environment's proxies once


@pytest.fixture
def server_of_weights(monkeypatch, tmp_path):
    """Serve what a function sends by a handler, in place of torchvision's file, whose content is `whole`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.whole)))
            self.end_headers()
            self.server.send(self.wfile)

    with http_server(Answer) as server:

        def serve(send, whole):
            server.send, server.whole = send, whole
            original = module.IMAGENET_WEIGHTS
            url = f"{server.url}/resnet50-{hashlib.sha256(whole).hexdigest()[:8]}.pth"

            class Served(WeightsEnum):
                WEIGHTS = Weights(url=url, transforms=original.transforms, meta=original.meta)

            monkeypatch.setattr(module, "IMAGENET_WEIGHTS", Served.WEIGHTS)

        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield serve


@pytest.mark.parametrize("way", ["cut short", "changed", "stalled"])
def test_a_download_that_goes_wrong_is_an_error_and_leaves_nothing(way, monkeypatch, tmp_path, server_of_weights):
    whole, over = bytes(1000), threading.Event()

    def send(file):
        file.write(whole[:500] if way != "changed" else b"x" * 1000)
        if way == "stalled":
            file.flush()
            over.wait()

    monkeypatch.setattr(module, "STALLED_S", 1)
    server_of_weights(send, whole)
    with pytest.raises(WeightsError, match="timed out" if way == "stalled" else "SHA-256"):
        load_resnet()
    over.set()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def put_in_torchvisions_cache(torch_home, content):
    name = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.url.rpartition("/")[2]
    file = torch_home / "hub" / "checkpoints" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    return file


def test_torchvisions_own_weights_come_from_its_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    state_dict = torchvision.models.resnet50().state_dict()
    torch.save(state_dict, put_in_torchvisions_cache(tmp_path, b""))
    model, transform, categories = load_resnet("imagenet")
    assert torch.equal(model.fc.weight, state_dict["fc.weight"]) and not model.training
    assert len(categories) == 1000 and transform(PHOTO).shape == (3, 224, 224)


def test_a_damaged_file_in_torchvisions_cache_is_named_with_the_cure(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = put_in_torchvisions_cache(tmp_path, b"half a download")
    with pytest.raises(WeightsError, match=str(file)):
        load_resnet("imagenet")
