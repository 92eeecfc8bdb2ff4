"""The LightningModule: a network, its objective and its optimizer. What is counted and drawn lives in callbacks."""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from cosinegate.config.schema import OptimizerConfig
from cosinegate.hardware.processes import sum_over_processes
from cosinegate.networks import GatedNetwork, Output
from cosinegate.objective import CosineGateLoss, Losses
from cosinegate.terminal.errors import NotFinite


class LitCosineGate(L.LightningModule):
    """Trains with relaxed gates and evaluates with hard ones. Every step returns what the network decided."""

    def __init__(
        self,
        *,
        network: GatedNetwork,
        objective: CosineGateLoss,
        optimizer: OptimizerConfig,
        num_classes: int,
        hparams: dict[str, Any],
    ) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)  # the resolved config, as primitives: a checkpoint can be read on its own
        self.network = network.to(memory_format=torch.channels_last)
        self.objective = objective
        self.epoch = 0.0  # t of prog(t), which the warmup callback moves
        self.optimizer_config = optimizer
        self.accuracy = nn.ModuleDict(
            {
                f"{stage}_acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False)
                for stage in ("val", "test")
            }
        )
        # "disable": a loss that is not a number shows, instead of being left out
        self.loss = nn.ModuleDict({f"{stage}_loss": MeanMetric(nan_strategy="disable") for stage in ("val", "test")})

    def forward(self, images: Tensor) -> Output:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        images, target = batch
        output = self.network(images)
        losses = self.objective(output, target, self.epoch)
        terms = Losses(*(term.detach() for term in losses))
        if sum_over_processes((~terms.total.isfinite()).float()) > 0:  # all processes stop where one must
            values = {name: term.item() for name, term in terms._asdict().items()}
            where = f"epoch {self.current_epoch + 1}, step {batch_idx + 1}"
            raise NotFinite(f"the loss is {values['total']} in {where}: not_finite.pt has the state before it", values)
        self.log("loss", terms.total, prog_bar=True, logger=False)
        return {"loss": losses.total, "losses": terms, "output": _detached(output)}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Output:
        return self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Output:
        return self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> Output:
        images, target = batch
        output = self.network(images)
        self._log_accuracy(stage, output, target)
        metric = self.loss[f"{stage}_loss"]
        metric.update(nn.functional.cross_entropy(output.logits, target, reduction="none"))
        self.log(f"{stage}/loss", metric, on_step=False, on_epoch=True, batch_size=len(target))
        return output

    def _log_accuracy(self, stage: str, output: Output, target: Tensor) -> None:
        metric = self.accuracy[f"{stage}_acc"]
        metric.update(output.logits, target)
        shown = stage == "val"
        self.log(f"{stage}/acc", metric, on_step=False, on_epoch=True, prog_bar=shown, batch_size=len(target))

    def configure_optimizers(self) -> dict[str, Any]:
        """SGD with momentum and cosine annealing to zero over the run, a step an epoch."""
        config = self.optimizer_config
        of_gates = {id(p) for block in self.network.blocks if block.gate for p in block.gate.parameters()}
        parameters = [p for p in self.network.parameters() if p.requires_grad]  # a γ that is not learned is not
        of_gate = {
            "weight_decay": config.weight_decay if config.decay_gates else 0.0,
            "lr": config.lr * config.gate_lr_factor,
        }
        groups = [
            {"params": [p for p in parameters if id(p) not in of_gates]},
            {"params": [p for p in parameters if id(p) in of_gates]} | of_gate,
        ]
        sgd = torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
        )
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=self.trainer.max_epochs)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": cosine, "name": "schedule/lr"}}


def _detached(output: Output) -> Output:
    routing = output.routing
    return Output(output.logits.detach(), routing and type(routing)(*(field.detach() for field in routing)))
