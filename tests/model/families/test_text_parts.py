"""Models that take more than text, as their decoder alone: equal to transformers on prompts of text, told of, and found
wherever config.json and the files have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from oracle import BACKENDS, backend, edit_config, logits, relative_error, write
from paged_model import CUTS, TOLERANCE, Paged, load, prompt
from quire.core.errors import ModelError
from quire.model.describe import describe
from quire.model.families.find import has_row, read_spec
from quire.model.families.multimodal import MULTIMODAL
from quire.model.families.table import FAMILIES
from quire.model.families.text_parts import find_text, text_part
from text_part_models import write_whole

logging.set_verbosity_error()
RUN = (
    "aria", "audioflamingo3", "aya_vision", "blip-2", "cohere2_vision", "cosmos3_omni", "deepseek_vl",
    "deepseek_vl_hybrid", "dots3_note", "emu3", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "fun_asr_nano", "glm46v",
    "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmasr", "glmga", "got_ocr2", "granite4_vision",
    "granite_docling", "granite_speech", "granite_speech_plus", "idefics2", "instructblip", "instructblipvideo",
    "janus", "kimi_k25",
    "lighton_ocr", "llava_next_video", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "mllama", "moss_transcribe_diarize",
    "muse_glimmer", "musicflamingo", "nemo_speechlm", "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma",
    "perception_lm", "phi4_multimodal", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni", "qwen2_5_omni_thinker",
    "qwen2_audio", "qwen3_asr", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen4_exp", "shieldgemma2", "step3p7",
    "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral",
)  # fmt: skip
"""Model types, of all that transformers has, whose decoders are read."""
UNSCALED = ("aya_vision", "cohere2_vision", "granite_speech")
"""Whose class in transformers leaves out what its decoder's own class does with logits: a factor."""
TINY = ("aria", "deepseek_vl", "dots3_note", "ernie4_5_vl_moe", "exaone4_5", "glm4v", "glm4v_moe", "glm5_next",
        "glm_ocr", "got_ocr2", "granite_docling", "idefics2", "lighton_ocr", "llava_next_video", "mllama",
        "muse_glimmer",
        "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "phi4_multimodal", "qwen2_5_omni_thinker",
        "qwen2_audio", "qwen3_omni_moe_thinker", "qwen4_exp", "step3p7", "video_llama_3", "vipllava", "voxtral",
        *UNSCALED)  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("model_type", TINY)
def test_text_alone_equals_transformers(model_type: str, tmp_path: Path) -> None:
    oracle = write_whole(tmp_path, model_type)
    sequences = [prompt(19, 1), prompt(7, 2), prompt(1, 3)]
    want = [logits(oracle, tokens) for tokens in sequences]
    for name in BACKENDS:
        model = load(tmp_path, backend(name))
        factor = model.spec.logit_scale if model_type in UNSCALED else 1.0
        assert [note for note in model.notes if f"only the decoder of {model_type!r} runs" in note]
        for cut in CUTS.values():
            for got, expected in zip(Paged(model, sequences).run(cut), want, strict=True):
                assert relative_error(got, expected * factor) <= TOLERANCE, name


def test_names_are_found_wherever_they_lie() -> None:
    llama, gpt2 = FAMILIES["llama"], FAMILIES["gpt2"]
    assert not callable(llama) and not callable(gpt2)

    def of(root: str, head: str) -> set[str]:
        return {
            f"{root}embed_tokens.weight",
            f"{root}layers.0.mlp.up_proj.weight",
            f"{root}norm.weight",
            f"{head}.weight",
        }

    tower = {"vision_model.encoder.layers.0.mlp.up_proj.weight", "model.vision_tower.layers.0.norm.weight"}
    for root, head in (
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("language.model.", "language.lm_head"),
        ("model.text_model.", "lm_head"),
        ("model.", "lm_head"),
        ("", "lm_head"),
    ):
        found = find_text(of(root, head) | tower, llama, "")
        assert found is not None and (found.root, found.head, found.kept) == (root, head, of(root, head)), root
    talks = of("thinker.model.", "thinker.lm_head") | of("talker.model.", "talker.codec_head")
    found = find_text(talks | tower, llama, "thinker.")
    assert found is not None and found.kept == of("thinker.model.", "thinker.lm_head")
    codes = {
        f"{name.removesuffix('.weight')}.qweight" for name in of("language_model.model.", "language_model.lm_head")
    }
    found = find_text(codes | tower, llama, "")
    assert found is not None and found.kept == codes
    own = {"decoder.transformer.wte.weight", "decoder.transformer.h.0.attn.c_attn.weight", "encoder.h.0.norm.weight"}
    found = find_text(own, gpt2, "")
    assert found is not None and found.root == "decoder.transformer." and "encoder.h.0.norm.weight" not in found.kept
    assert find_text(tower, llama, "") is None


TEXT = {"model_type": "llama", "hidden_size": 64, "vocab_size": 99}


def test_where_config_json_has_the_decoder() -> None:
    vision = {"model_type": "eva", "hidden_size": 32}
    for raw, where, others in (
        ({"model_type": "new_vl", "text_config": TEXT, "vision_config": vision}, "text_config", ("vision_config",)),
        (
            {"model_type": "internvl_chat", "llm_config": TEXT, "vision_config": vision},
            "llm_config",
            ("vision_config",),
        ),
        ({"model_type": "deepseek_vl_v2", "language_config": TEXT}, "language_config", ()),
        ({"model_type": "llava", "text_config": TEXT, "vision_config": vision}, "text_config", ("vision_config",)),
        (
            {
                "model_type": "new_omni",
                "talker_config": {"model_type": "talker"},
                "thinker_config": {"text_config": TEXT, "audio_config": {"model_type": "ears"}},
            },
            "thinker_config: text_config",
            ("talker_config", "audio_config"),
        ),
    ):
        part = text_part(raw)
        assert part is not None and (part.where, part.others) == (where, others)
        assert all(word in part.told for word in (str(raw["model_type"]), *others))
        assert part.config["hidden_size"] == 64 and part.config["model_type"] == "llama"
    assert text_part({"model_type": "llava", "text_config": TEXT, "vision_config": {"model_type": "pixtral"}}) is None
    assert text_part(TEXT) is None and text_part({"model_type": "llava"}) is None
    assert text_part({"model_type": "new_vl", "text_config": {"hidden_size": 64}}) is None
    for said, tied in (({}, True), ({"tie_word_embeddings": False}, False), ({"tie_word_embeddings": True}, True)):
        part = text_part({"model_type": "new_vl", "text_config": TEXT} | said)
        assert part is not None and part.config["tie_word_embeddings"] is tied


def test_a_head_and_adapters_of_other_parts(tmp_path: Path) -> None:
    """A folder of other names: the original layout of a model whose code is not run."""
    write(tmp_path, "llama")
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    tensors["mlp1.0.weight"] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, model_type="internvl_chat", llm_config=text, auto_map={"AutoModel": "code.py"})
    found = describe(str(tmp_path))
    assert found.spec.family == "llama" and not found.spec.tied_head and found.tensors == len(tensors) - 1
    assert any("only the decoder of 'internvl_chat' runs" in note for note in found.notes)
    edit_config(tmp_path, llm_config=text | {"model_type": "unheard_of"})
    with pytest.raises(ModelError, match=r"llm_config: model_type: 'unheard_of' is not supported"):
        describe(str(tmp_path))


def every_model_type() -> list[str]:
    """What transformers answers text with beside something else, and is not built with all of its parts."""
    names = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    return sorted(set().union(*names) - set(MULTIMODAL))


def decoder_of(model_type: str) -> str:
    """The decoder's type in a config of defaults, "" where there is none of its own."""
    raw = AutoConfig.for_model(model_type).to_dict() | {"model_type": model_type}
    part = text_part(raw)
    return "" if part is None else str(part.config["model_type"])


def test_every_model_type_is_decided() -> None:
    """Whether the decoder of each that transformers has is read; one that no row reads is refused by its name."""
    decoders = {name: decoder_of(name) for name in every_model_type()}
    for name, decoder in decoders.items():  # `pytest -s` shows the list
        print(f"{name}: {decoder or 'no decoder of its own'}{'' if has_row(decoder) else ', not read'}")
    assert set(RUN) <= {name for name, decoder in decoders.items() if has_row(decoder)}
    for name, decoder in decoders.items():
        if decoder and not has_row(decoder):
            raw = AutoConfig.for_model(name).to_dict() | {"model_type": name}
            with pytest.raises(ModelError, match=decoder):
                read_spec(raw, "config.json")


WITH_IMAGES = ("gemma4", "gemma4_unified", "llama4")
"""Of those whose images are read, some whose files leave fields out."""


NOT_WHOLE = ("glm4v_moe", "qwen4_exp")
"""Whose defaults are of no model: there is no head size that divides the width, or no indexer."""


@pytest.mark.parametrize("model_type", [name for name in (*RUN, *WITH_IMAGES) if name not in NOT_WHOLE])
def test_what_saved_files_leave_out(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    whole = read_spec(json.loads(config.to_json_string(use_diff=False)), "config.json")[0]
    assert read_spec(json.loads(config.to_json_string()), "config.json")[0] == whole
