"""llama.cpp's and TGI's own APIs; the latter by Hugging Face's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import InferenceClient

from live_server import LiveServer, live
from stub_engine import StubEngine, stub_info
from tool_replies import saying

SAID = "Let me see what is here.\nNo more."


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with saying(SAID) as server:
        yield server


def complete(server: LiveServer, **fields: Any) -> dict[str, Any]:
    reply = server.post("/completion", {"prompt": "hello", **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_llama_cpp_continues(server: LiveServer) -> None:
    reply = complete(server)
    assert (reply["content"], reply["stop"], reply["stop_type"]) == (SAID, True, "eos")
    assert reply["tokens_predicted"] == reply["timings"]["predicted_n"] == len(server.tokenizer.encode(SAID)) + 1
    request = server.stub.submitted[-1]
    assert reply["timings"]["prompt_n"] + reply["timings"]["cache_n"] == len(request.prompt)
    assert request.params.max_tokens == 2048 - len(request.prompt)
    assert complete(server, n_predict=3)["stop_type"] == "limit"
    cut = complete(server, stop=["what"])
    assert (cut["content"], cut["stop_type"], cut["stopping_word"]) == ("Let me see ", "word", "what")


def test_llama_cpp_streams(server: LiveServer) -> None:
    reply = server.post("/completion", {"prompt": "hello", "stream": True})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert "".join(event["content"] for event in events) == SAID
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["timings"]["predicted_n"] == events[-1]["tokens_predicted"]


def test_llama_cpp_continues_several(server: LiveServer) -> None:
    prompts = ["hello", "hello there"]
    both = server.post("/completion", {"prompt": prompts}).json()
    assert [(each["index"], each["content"], each["prompt"]) for each in both] == [
        (0, SAID, "hello"),
        (1, SAID, prompts[1]),
    ]
    assert [each["tokens_evaluated"] for each in both] == [len(server.tokenizer.encode(text)) for text in prompts]
    assert [each["index"] for each in server.post("/completion", {"prompt": [[9, 9]], "n_predict": 1}).json()] == [0]
    assert isinstance(complete(server, prompt=[9, 9], n_predict=1), dict), "ids are one prompt"
    reply = server.post("/completion", {"prompt": prompts, "stream": True, "timings_per_token": True})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    for index in range(2):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in own) == SAID
        assert [event["stop"] for event in own] == [False] * (len(own) - 1) + [True] and all(
            "timings" in e for e in own
        )


def test_timings_of_openais_replies(server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "hi", "max_tokens": 3})):
        assert "timings" not in server.post(path, body).json()
        timings = server.post(path, body | {"timings_per_token": True}).json()["timings"]
        assert timings["predicted_n"] == 3 and timings.keys() == complete(server, n_predict=1)["timings"].keys()
        events, done = server.events(path, body | {"timings_per_token": True})
        assert done and all("timings" in event for event in events) and events[-1]["timings"]["predicted_n"] == 3


def test_llama_cpps_fields(server: LiveServer) -> None:
    fields = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2, "seed": 7,
              "logit_bias": [[17, 2.5], [18, False]], "ignore_eos": True, "n_predict": 2, "mirostat": 2}  # fmt: skip
    reply = server.post("/completion", {"prompt": "a", **fields})
    params = server.stub.submitted[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
    assert (params.repetition_penalty, params.seed, params.ignore_eos) == (1.2, 7, True)
    assert params.logit_bias == {17: 2.5, 18: -100.0} and "mirostat" in reply.headers["warning"]
    assert reply.json()["generation_settings"]["top_k"] == 3
    salts = []
    for cached in (True, False, False):
        complete(server, cache_prompt=cached, n_predict=1)
        salts.append(server.stub.submitted[-1].cache_salt)
    assert salts[0] == "" and len(set(salts)) == 3
    [first, *_] = complete(server, n_probs=2)["completion_probabilities"]
    assert first["logprob"] == -0.5 and [top["id"] for top in first["top_logprobs"]] == [first["id"], first["id"] + 1]
    assert complete(server, prompt=server.tokenizer.encode("hello"), return_tokens=True, n_predict=2)["tokens"]


def test_llama_cpps_defaults(server: LiveServer) -> None:
    complete(server, n_predict=1, top_k=7)
    params = server.stub.submitted[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 7, 0.95, 0.05)
    settings = server.http.get("/props").json()["default_generation_settings"]["params"]
    assert (settings["temperature"], settings["top_k"], settings["min_p"]) == (0.8, 40, 0.05)
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert server.stub.submitted[-1].params.temperature == 1.0, "OpenAI's"
    with live(StubEngine(stub_info(generation_defaults={"temperature": 0.3}))) as own:
        complete(own, n_predict=1)
        params = own.stub.submitted[-1].params
        assert (params.temperature, params.top_k, params.min_p) == (0.3, 0, 0.0), "the model's"


def test_llama_cpps_state(server: LiveServer) -> None:
    props = server.http.get("/props").json()
    slots = server.http.get("/slots").json()
    assert props["total_slots"] == len(slots) and props["default_generation_settings"]["n_ctx"] == 2048
    assert not any(slot["is_processing"] for slot in slots) and "tool_call" in props["chat_template"]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/completion", {"n_predict": 0}, "n_predict"),
        ("/completion", {"repeat_penalty": 0}, "repeat_penalty"),
        ("/completion", {"logit_bias": [[1]]}, "logit_bias[0]"),
        ("/completion", {"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ("/completion", {"n_probs": 99}, "n_probs"),
        ("/generate", {"parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens"),
        ("/generate", {"parameters": {"temperature": -1}}, "parameters.temperature"),
        ("/generate", {"parameters": {"watermark": True}}, "parameters.watermark"),
        ("/generate", {"parameters": {"grammar": {"type": "x"}}}, "parameters.grammar.type"),
        ("/generate", {"parameters": {"best_of": 2}}, "parameters.best_of"),
        ("/generate", {"parameters": {"adapter_id": "none"}}, "parameters.adapter_id"),
        ("/generate", {"inputs": ""}, "inputs"),
    ],
    ids=str,
)
def test_what_is_refused(server: LiveServer, path: str, fields: dict[str, Any], named: str) -> None:
    given = {"inputs": "hi"} if path == "/generate" else {"prompt": "hi"}
    reply = server.post(path, {**given, **fields})
    assert reply.status_code == (404 if "adapter" in named else 400), reply.text
    error = reply.json()["error"]
    if path == "/generate":
        assert error.startswith(f"{named}:") and reply.json()["error_type"] == "validation"
    else:
        assert error["message"].startswith(f"{named}:") and error["code"] == 400


def test_hugging_faces_client(server: LiveServer) -> None:
    client = InferenceClient(model=server.url, token="none")
    assert client.text_generation("hello", max_new_tokens=50) == SAID
    request = server.stub.submitted[-1]
    assert (request.params.temperature, request.params.max_tokens) == (0.0, 50)
    parts = list(client.text_generation("hello", max_new_tokens=50, stream=True, details=True))
    assert "".join(part.token.text for part in parts if not part.token.special) == SAID == parts[-1].generated_text
    last = parts[-1].details
    assert last is not None and (last.finish_reason, last.generated_tokens) == ("eos_token", len(parts))
    whole = client.text_generation(
        "hello", max_new_tokens=4, details=True, temperature=0.5, seed=3, return_full_text=True, top_n_tokens=2
    )
    assert whole.generated_text.startswith("helloLet") and whole.details is not None
    assert (whole.details.finish_reason, whole.details.seed) == ("length", 3) and len(whole.details.tokens) == 4
    assert server.stub.submitted[-1].params.temperature == 0.5
    cut = client.text_generation("hello", stop=["what"])
    assert cut == "Let me see what", "the stop string is part of TGI's texts"
    chat = InferenceClient(base_url=f"{server.url}/v1", api_key="none")
    reply = chat.chat_completion([{"role": "user", "content": "hi"}], model="stub", max_tokens=50)
    assert reply.choices[0].message.content == SAID


def test_tgis_own_routes(server: LiveServer) -> None:
    assert server.post("/generate", {"inputs": "hello"}).json() == {"generated_text": SAID}
    assert server.post("/", {"inputs": "hello"}).json() == [{"generated_text": SAID}]
    streamed = server.post("/generate_stream", {"inputs": "hello"}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    assert events[-1]["generated_text"] == SAID and [e["index"] for e in events] == list(range(1, len(events) + 1))
    told = server.http.get("/info").json()
    assert (told["model_id"], told["max_total_tokens"], told["router"]) == ("stub", 2048, "quire")


def test_failures_in_streams() -> None:
    with live() as server:
        server.stub.poison = 3
        for path, body in (("/generate_stream", {"inputs": "a"}), ("/completion", {"prompt": "a", "stream": True})):
            last = server.post(path, body).text.strip().split("\n")[-1]
            assert "NaN" in str(json.loads(last.removeprefix("data: "))["error"])
