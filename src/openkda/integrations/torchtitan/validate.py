"""torchtitan's validator on the held-out text, at the steps one asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator

from openkda.integrations.torchtitan.data import TextDataLoader


class HeldOutValidator(Validator):
    """Measure every `freq` steps. torchtitan's own also measures after step 1, which costs a whole pass for nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        enable: bool = True
        dataloader: BaseDataLoader.Config = field(
            default_factory=lambda: TextDataLoader.Config(split="heldout", infinite=False)
        )

    def should_validate(self, step: int) -> bool:
        return step % self.config.freq == 0
