"""What a watermark asks of a call."""

from __future__ import annotations

from collections.abc import Mapping

from unspool.config import GenerationConfig, GumbelWatermarkingConfig
from unspool.errors import SettingError


def check_watermark(settings: GenerationConfig, spoken: Mapping[str, str]) -> None:
    """Refuse what a watermark that draws its tokens itself can't be: it needs a draw, and gives one text a prompt."""
    marks = settings.watermarking_config
    listed = marks if isinstance(marks, list) else [marks]
    if not any(isinstance(mark, GumbelWatermarkingConfig) for mark in listed):
        return
    told = f"the Gumbel watermark, set {spoken['watermarking_config']},"
    if not settings.do_sample or (settings.num_beams or 1) > 1:
        raise SettingError(
            f"{told} is a way to sample, and this call does not sample one token at a time; set do_sample=True without "
            "beams, or use a WatermarkingConfig, which marks every way to decode"
        )
    if (settings.num_return_sequences or 1) > 1:
        raise SettingError(
            f"{told} draws the same text for the same prompt and key, so num_return_sequences="
            f"{settings.num_return_sequences} would give copies; ask for one, or give prompts of the same text keys of "
            "their own (a list in `watermarking_config`)"
        )
