"""Options beside which a model takes no pictures."""

from __future__ import annotations

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.speculation import LOOK_UPS


def check_options(config: EngineConfig, name: str) -> None:
    """`ConfigError` for what cannot be beside pictures, with the reason; `name`: of a model that takes them."""
    parallel, asked = config.parallel, config.speculation.asked
    drafts = asked is not None and asked.method not in (*LOOK_UPS, "self")
    for beside, option, reason in (
        (parallel.pipeline_parallel_size > 1, "pipeline_parallel_size", "only the first of several stages is given "
         "rows of pictures, and others need their positions"),
        (parallel.context_parallel_size > 1, "context_parallel_size", "a step's rows are spread over ranks, which are "
         "not told which of theirs are of pictures"),
        (parallel.enable_sequence_parallel, "enable_sequence_parallel", "rows are split between the layers, where "
         "those of pictures would be given"),
        (drafts, "speculative_config", "this way to draft reads prompts, and knows no rows of pictures; ngram, suffix "
         "and self do without"),
    ):  # fmt: skip
        if beside:
            raise ConfigError(
                f"--{option.replace('_', '-')}: {name} takes pictures, and {reason}. Leave it out, or serve the "
                "model's text alone with --language-model-only",
                param=option,
            )
