"""The search space: what a search varies, and between which values. It is checked without torch."""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from cosinegate.config.checks import check_one_of_several, validate
from cosinegate.terminal.errors import UserError


@dataclass
class Space:
    """The varied keys, and the config that they are put into."""

    nodes: DictConfig
    base: DictConfig

    def __post_init__(self) -> None:
        self.distributions = {name: self._distribution(name) for name in self.nodes}
        for edge in ("low", "high"):
            try:
                validate(self.place({name: getattr(part, edge) for name, part in self.distributions.items()}))
            except UserError as error:
                raise UserError(f"search.space, at its {edge} edge: {error}") from error

    def _distribution(self, name: str) -> BaseDistribution:
        node = self.nodes[name]
        try:
            now = OmegaConf.select(self.base, node.key)
        except OmegaConfBaseException:  # not even the form of a key
            now = None
        if not isinstance(now, int | float) or isinstance(now, bool):
            raise UserError(f"search.space.{name}.key = {node.key}: not the key of a number")
        kind = IntDistribution if isinstance(now, int) else FloatDistribution
        try:
            return kind(type(now)(node.low), type(now)(node.high), log=node.log)
        except ValueError as error:
            raise UserError(f"search.space.{name}: {error}") from error

    def place(self, params: dict[str, Any]) -> DictConfig:
        """Returns the config of a run with these values."""
        config = self.base.copy()
        for name, value in params.items():
            OmegaConf.update(config, self.nodes[name].key, value)
        return config


def search_space(config: DictConfig) -> Space:
    """Returns the space of a search's config. Raises UserError if no run could have its values."""
    check_one_of_several(config)
    return Space(config.search.space, OmegaConf.masked_copy(config, [key for key in config if key != "search"]))
