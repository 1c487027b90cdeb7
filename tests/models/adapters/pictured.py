"""Tiny random models that read pictures, their inputs, and folders of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

PICTURE = 3  # the token that stands for a picture's embeddings
FAMILIES = ("llava", "idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "gemma3")
_VISION = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}
_MARKS = {
    "llava": "<image>",
    "idefics3": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
}
_TOKENS = {
    "llava": ["<image>"],
    "idefics3": [
        *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ],
    "qwen2_vl": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
    "gemma3": ["<image_soft_token>", "<start_of_turn>", "<start_of_image>", "<end_of_image>"],
}
_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}MARK{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_pictured(name: str, seed: int = 0) -> Any:
    """A model of a family, as an object of transformers."""
    torch.manual_seed(seed)
    model = getattr(transformers, _CLASSES[name])(_make_config(name)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


_CLASSES = {
    "llava": "LlavaForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
}


def _make_text(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ids = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    return {**sizes, **heads, **ids, "initializer_range": 0.3, **more}


def _make_config(name: str) -> Any:
    if name == "llava":
        vision = transformers.CLIPVisionConfig(hidden_size=32, image_size=28, projection_dim=32, **_VISION)
        text = transformers.LlamaConfig(**_make_text())
        return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=PICTURE)
    if name in ("idefics3", "smolvlm"):
        kind = transformers.Idefics3Config if name == "idefics3" else transformers.SmolVLMConfig
        return kind(
            text_config=transformers.LlamaConfig(**_make_text()),
            vision_config={"hidden_size": 32, "image_size": 56, **_VISION},
            image_token_id=PICTURE,
            scale_factor=2,
            pad_token_id=0,
        )
    if name == "gemma3":
        return transformers.Gemma3Config(
            text_config=_make_text(
                head_dim=16,
                sliding_window=8,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "full_attention"],
            ),
            vision_config={"hidden_size": 32, "image_size": 56, "vision_use_head": False, **_VISION},
            mm_tokens_per_image=4,
            image_token_index=PICTURE,
            boi_token_index=5,
            eoi_token_index=6,
        )
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    common = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    ids = {"image_token_id": PICTURE, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    text = _make_text(rope_parameters=rope)
    if name == "qwen2_vl":
        vision = {**common, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    own = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
    vision = {**common, **own, "fullatt_block_indexes": [1], "window_size": 56}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)


def make_inputs(name: str, seed: int = 3) -> dict[str, torch.Tensor]:
    """Two prompts of different lengths with pictures, as a processor returns them."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> list[int]:
        return torch.randint(10, 300, (count,), generator=generator).tolist()

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    picture = [PICTURE] * 4
    if name == "llava":
        rows = [words(3) + picture + words(2), words(1) + picture + words(2)]
        given = {"pixel_values": numbers(2, 3, 28, 28)}
    elif name in ("idefics3", "smolvlm"):
        rows = [words(3) + picture + words(2) + picture, words(1) + picture + words(4)]
        pixels = numbers(2, 2, 3, 56, 56)
        pixels[1, 1] = 0  # the second row has one picture
        given = {"pixel_values": pixels}
    elif name == "gemma3":
        rows = [
            [*words(3), 5, *picture, 6, *words(5), 5, *picture, 6, *words(2)],
            [*words(6), 5, *picture, 6, *words(3)],
        ]
        given = {"pixel_values": numbers(3, 3, 56, 56)}
    else:
        rows = [[*words(3), 5, *[PICTURE] * 6, 6, *words(2)], [*words(2), 5, *picture, 6, *words(1)]]
        given = {"image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 4]]), "pixel_values": numbers(40, 3 * 2 * 14 * 14)}
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    kinds = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
    if name in kinds:
        given[kinds[name]] = (ids == PICTURE).long()
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), **given}


def save_pictured(name: str, folder: Path) -> Path:
    """A folder with a model and its processor; needs Pillow."""
    make_pictured(name).save_pretrained(folder)
    tokenizer = make_tokenizer(_TOKENS[name], _TEMPLATE.replace("MARK", _MARKS[name]))
    if name == "qwen2_vl":  # its processor is not made without torchvision, which reads videos
        transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
        ).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": "Qwen2VLProcessor"}))
        return folder
    if name == "llava":
        pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        processor = transformers.LlavaProcessor(
            image_processor=pixels,
            tokenizer=tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    elif name == "idefics3":
        pixels = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
        processor = transformers.Idefics3Processor(image_processor=pixels, tokenizer=tokenizer, image_seq_len=4)
    else:
        marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        tokenizer._set_model_specific_special_tokens(marks)
        pixels = transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
        processor = transformers.Gemma3Processor(image_processor=pixels, tokenizer=tokenizer, image_seq_length=4)
    processor.save_pretrained(folder)
    return folder


def save_captioner(folder: Path) -> Path:
    """A folder with a GIT, which describes pictures without being asked; needs Pillow."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.GitConfig(
        vocab_size=300,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
        vision_config={"hidden_size": 32, "image_size": 28, **_VISION},
        **sizes,
    )
    transformers.GitForCausalLM(config).eval().save_pretrained(folder)
    pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    transformers.GitProcessor(image_processor=pixels, tokenizer=make_tokenizer([], None)).save_pretrained(folder)
    return folder


def _order(character: str) -> tuple[bool, str]:
    return not (character.islower() and character.isascii()) and character != "Ġ", character


def make_tokenizer(tokens: list[str], template: str | None, size: int = 300) -> Any:
    """A tokenizer of bytes, of which those beyond `size` tokens are left out."""
    names = ["<pad>", "<s>", "</s>", *tokens, *sorted(ByteLevel.alphabet(), key=_order)][:size]
    backend = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=tokens,
    )
    made.chat_template = template
    return made
