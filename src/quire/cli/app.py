"""All commands under one name. Each is imported when it is called: help lists them without their code."""

from __future__ import annotations

from typing import Any

import click

from quire.cli.group import LazyGroup, Listed
from quire.core.version import VERSION

TALK, MODELS, MAKE, MEASURE, MORE = "Talk to a model", "Models", "Make models", "Measure and predict", "More"
"""Headings of help."""
COMMANDS = {
    "run": Listed(
        "quire.cli.chat.command:run",
        "Chat with a model, or answer PROMPT once; a model that is not here is pulled first.",
        TALK,
    ),
    "chat": Listed(
        "quire.cli.chat.command:chat",
        "Chat with a model: one here, or that of a running server (--server URL). /help lists what a line may be.",
        TALK,
    ),
    "generate": Listed(
        "quire.cli.generate:generate", "Continue texts, printing them as they grow; timings go to standard error.", TALK
    ),
    "transcribe": Listed("quire.cli.transcribe:transcribe", "Write down what is said in audio files.", TALK),
    "embed": Listed(
        "quire.cli.embed_texts:embed",
        "Write the vectors of a file of texts. Run it again to go on where it was cut off.",
        TALK,
    ),
    "serve": Listed(
        "quire.cli.serve:serve",
        "Serve a model over HTTP with OpenAI's API. Ctrl-C, SIGTERM or SIGHUP drains it, SIGUSR1 restarts its engines.",
        TALK,
    ),
    "ps": Listed("quire.cli.running:ps", "List running servers: model, memory, requests, address and uptime.", TALK),
    "stop": Listed(
        "quire.cli.running:stop",
        "Stop running servers: requests in flight are finished first. Without a name, the only one that runs.",
        TALK,
    ),
    "pull": Listed(
        "quire.cli.store:pull", "Download models by name. A pull that was cut off goes on where it ended.", MODELS
    ),
    "list": Listed(
        "quire.cli.store:list_models",
        "List the models on this machine: those that were pulled, and those in the hub's cache that quire can run.",
        MODELS,
    ),
    "show": Listed(
        "quire.cli.store:show_model",
        "Show a model: architecture, parameters, context, quantization, license, template and sampling defaults.",
        MODELS,
    ),
    "rm": Listed("quire.cli.store:remove", "Remove models from this machine.", MODELS),
    "inspect": Listed(
        "quire.cli.inspect:inspect",
        "Facts of a model and what would be decided for it, from its headers alone: no weight is read.",
        MODELS,
    ),
    "doctor": Listed(
        "quire.cli.doctor:doctor",
        "What runs on this machine, why not something else, and what is slow here. Exits with 1 when only the slow "
        "reference would run.",
        MODELS,
    ),
    "plan": Listed(
        "quire.cli.plan:plan",
        "Memory, latency, throughput, devices and cost of a model under a load, and what to change first.",
        MODELS,
    ),
    "compress": Listed("quire.cli.compress:compress", "Make SOURCE smaller, and write it to OUT.", MAKE),
    "train": Listed(
        "quire.cli.train:train", "Train MODEL, and write an adapter in PEFT's layout or a model to OUT.", MAKE
    ),
    "train-heads": Listed(
        "quire.cli.train_heads:train_heads",
        "Train heads that draft for MODEL, and write them to OUT in their public layout.",
        MAKE,
    ),
    "eval": Listed(
        "quire.cli.evaluate:evaluate",
        "How good a model is: perplexity, questions with choices and short answers; beside another; passports.",
        MAKE,
    ),
    "bench": Listed("quire.cli.bench:bench", "Measure latency, throughput, or a server under load.", MEASURE),
    "tune": Listed(
        "quire.cli.tune:tune",
        "Search for the best configuration under a load: all are predicted, few measured; options that are given stay.",
        MEASURE,
    ),
    "simulate": Listed(
        "quire.cli.simulate:simulate",
        "Predict how a cluster serves a load: the real scheduler, KV blocks, prefix cache and router, and no model.",
        MEASURE,
    ),
    "dashboard": Listed(
        "quire.cli.dashboard:dashboard", "Show rows: one page that needs no network, for any browser.", MEASURE
    ),
    "run-batch": Listed(
        "quire.cli.run_batch:run_batch",
        "Answer a file of requests. Run it again to go on where it was cut off, and to try lines with an error again; "
        "exit code 1 while a line has one.",
        MORE,
    ),
    "replay": Listed(
        "quire.cli.replay:replay",
        "Run a recording again and compare every token with those that were recorded; exit code 1 where one differs.",
        MORE,
    ),
    "demo": Listed(
        "quire.cli.demo:demo",
        "Serve a model on a free port, stream several answers at once, and shut it down cleanly.",
        MORE,
    ),
    "completion": Listed(
        "quire.cli.completion:completion", "Print what completes commands, flags and models in a shell.", MORE
    ),
    "help": Listed("quire.cli.completion:help_of", "Show the help of a command.", MORE),
}


class App(LazyGroup):
    """The command `quire`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that is asked for; Ctrl-C ends it with exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # which click would call an abortion, with exit code 1
            raise click.exceptions.Exit(130) from None


app = App(
    COMMANDS,
    name="quire",
    help="An LLM inference engine, server and workbench.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(VERSION, "--version", "-V", "-v", prog_name="quire", message="%(prog)s %(version)s")(app)
