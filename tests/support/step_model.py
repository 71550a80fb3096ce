"""Step-3.5's decoder with a head, which transformers has only inside a model that takes images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Step3p7TextConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel):
    """The layers of transformers, and a matrix behind them."""

    config: Step3p7TextConfig
    config_class = Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **more: Any) -> CausalLMOutput:
        """Logits [B, T, vocab] of input_ids [B, T]."""
        logits = self.lm_head(self.model(input_ids, **more).last_hidden_state)
        return CausalLMOutput(logits=logits)
