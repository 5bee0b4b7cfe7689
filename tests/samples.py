"""What tests and their fixtures both name. Not in conftest.py: tests/clusters has one of its own."""

import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pandas as pd
import torch
import torchvision

from workshop_utils.checkpoint import save_checkpoint
from workshop_utils.object_store import ADMIN
from workshop_utils.predicting.classifier import Classifier

ODD_NAMES = ["a b.jpg", "dög.jpg", "50%.jpg", "a%20b.jpg", "a#1.jpg", "a?.jpg", "a[1].jpg", "a*.jpg", "a{b}.jpg"]
IMAGENET = torchvision.models.ResNet50_Weights.DEFAULT.meta["categories"]
S3_SECRET = "known-to-the-tests"


def sign_in(monkeypatch, s3):
    """Let the workshop write to the tests' S3 server, by what a user's environment would hold."""
    settings = {"ENDPOINT_URL": s3["client_kwargs"]["endpoint_url"]}
    settings |= {"ACCESS_KEY_ID": ADMIN, "SECRET_ACCESS_KEY": S3_SECRET}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def make_weights(path, seed):
    torch.manual_seed(seed)
    model = torchvision.models.resnet18(num_classes=1000)
    model.train()(torch.rand(16, 3, 128, 128))  # sets BatchNorm's statistics, or all photos would look alike
    torch.nn.init.normal_(model.fc.weight, std=0.5)
    save_checkpoint(path, arch="resnet18", num_classes=1000, categories=IMAGENET, state_dict=model.state_dict())
    return str(path)


def classified(batches, **settings):
    """Return (checksum, rows) of lists of paths, which a Classifier of this process says."""
    classifier = Classifier(**settings)
    frames = [classifier(classifier.load([(path, path) for path in batch])) for batch in batches]
    rows = [tuple(None if pd.isna(value) else value for value in row) for frame in frames for row in frame.values]
    return rows[0][-1], [row[:-1] for row in rows]


class Server(ThreadingHTTPServer):
    """A server on a port of its own of loopback. url: its address."""

    request_queue_size = 64  # by default 5, and the kernel lets the other connections try again a second later

    def __init__(self, handler):
        handler.log_message = lambda *_: None
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def http_server(handler, **about):
    """Answer by this handler's class while the block runs; yield the Server, which has these attributes."""
    with Server(handler) as server:
        vars(server).update(about)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
