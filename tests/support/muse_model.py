"""Muse Glimmer's decoder with a head, which transformers has only inside a model that takes images."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MuseGlimmerTextConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel, MuseGlimmerTextModel


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel):
    """The layers of transformers; what becomes of their rows is as `MuseGlimmerForConditionalGeneration` has it, whose
    answers `test_text_parts.py` compares."""

    config: MuseGlimmerTextConfig
    config_class = MuseGlimmerTextConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **more: Any) -> CausalLMOutput:
        """Logits [B, T, vocab] of input_ids [B, T]."""
        cap, rows = self.config.final_logit_softcapping, self.model(input_ids, **more).last_hidden_state
        logits = cap * torch.tanh(self.lm_head(rows) * self.config.output_multiplier / cap)
        return CausalLMOutput(logits=logits)  # type: ignore[arg-type]


AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
