"""The networks of timm and torchvision, untrained, by the names that those libraries have for them."""

import difflib
from typing import Any

import torch
from torch import nn

from cosinegate.config.choices import Library
from cosinegate.terminal.errors import UserError

BY_DATA = ("num_classes", "in_chans", "in_channels", "weights")  # what the data set or `weights=` says
FROM_ELSEWHERE = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")


def library_model(
    library: Library, name: str, options: dict[str, Any], in_channels: int, num_classes: int
) -> nn.Module:
    """Returns the library's network for images of so many channels, with `options` of its own."""
    for key in options:
        if key in BY_DATA:
            raise UserError(f"network.options.{key}: follows from the data set and from weights=; leave it out")
        if key in FROM_ELSEWHERE:
            words = "fetched weights are for Python: cosinegate.add_gates(timm.create_model(..., pretrained=True), ...)"
            raise UserError(f"network.options.{key}: {words}")
    make = _timm if library is Library.timm else _torchvision
    try:
        return make(name, options, in_channels, num_classes)
    except (TypeError, ValueError, AssertionError, RuntimeError, LookupError, AttributeError) as error:
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"network.options = {options}: {name} cannot be made so: {words}") from error


def _timm(name: str, options: dict[str, Any], in_channels: int, num_classes: int) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise UserError("network=timm: timm is not installed; pip install 'cosinegate[timm]' does it") from error
    _require_known(name, timm.list_models())
    return timm.create_model(name, num_classes=num_classes, in_chans=in_channels, **options)


def _torchvision(name: str, options: dict[str, Any], in_channels: int, num_classes: int) -> nn.Module:
    import torchvision.models

    _require_known(name, torchvision.models.list_models(module=torchvision.models))
    model = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    path, first = next((path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d))
    if first.in_channels != in_channels:
        kept = ("out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
        made = nn.Conv2d(in_channels, **{key: getattr(first, key) for key in kept}, bias=first.bias is not None)
        nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, made)
    return model


def _require_known(name: str, known: list[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise UserError(f"network.model = {name}: no such network in this library{hint}")


def parameter_count(
    library: Library, name: str, options: dict[str, Any], in_channels: int, num_classes: int
) -> int | None:
    """Returns how many parameters it has, without their memory; None where it cannot be made without."""
    try:
        with torch.device("meta"):
            model = library_model(library, name, options, in_channels, num_classes)
    except NotImplementedError:
        return None
    return sum(parameter.numel() for parameter in model.parameters())
