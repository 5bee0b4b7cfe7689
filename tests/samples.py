"""What tests and their fixtures both name. Not in conftest.py: tests/clusters has one of its own."""

import torch
import torchvision

from workshop_utils.checkpoint import save_checkpoint
from workshop_utils.object_store import ADMIN

ODD_NAMES = ["a b.jpg", "dög.jpg", "50%.jpg", "a%20b.jpg", "a#1.jpg", "a?.jpg", "a[1].jpg", "a*.jpg", "a{b}.jpg"]
S3_SECRET = "known-to-the-tests"


def sign_in(monkeypatch, s3):
    """Let the workshop write to the tests' S3 server, by what a user's environment would hold."""
    import s3fs  # which the base does without

    s3fs.S3FileSystem.clear_instance_cache()  # a filesystem that was made before is somebody else's
    settings = {"ENDPOINT_URL": s3["client_kwargs"]["endpoint_url"]}
    settings |= {"ACCESS_KEY_ID": ADMIN, "SECRET_ACCESS_KEY": S3_SECRET}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def make_weights(path, seed):
    torch.manual_seed(seed)
    model = torchvision.models.resnet18(num_classes=1000)
    model.train()(torch.rand(16, 3, 128, 128))  # sets BatchNorm's statistics, or all photos would look alike
    torch.nn.init.normal_(model.fc.weight, std=0.5)
    save_checkpoint(path, arch="resnet18", num_classes=1000, state_dict=model.state_dict())
    return str(path)
