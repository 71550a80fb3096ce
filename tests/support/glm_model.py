"""The decoder of GLM-5-Next with a head, which transformers has only inside a model that takes images."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Glm5NextTextConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel


class Glm5NextForCausalLM(Glm5NextPreTrainedModel):
    """The layers of transformers, and a matrix behind them."""

    config: Glm5NextTextConfig
    config_class = Glm5NextTextConfig

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **more: Any) -> CausalLMOutput:
        """Logits [B, T, vocab] of input_ids [B, T]."""
        logits = self.lm_head(self.model(input_ids, **more).last_hidden_state)
        return CausalLMOutput(logits=logits)
