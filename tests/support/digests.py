"""The digest of a model, printed by the scripts that the tests train: equal when every bit is."""

import hashlib

import torch
from torch import nn


def digest_of(model: nn.Module) -> str:
    """SHA-256 over parameters and buffers, in order."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole = tensor.detach().cpu().contiguous()
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
