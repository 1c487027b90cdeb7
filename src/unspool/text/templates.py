"""Which of a model's chat templates a chat is written with."""

from __future__ import annotations

from unspool.errors import SettingError


def choose_template(templates: str | dict[str, str] | None, wanted: str | None, *, has_tools: bool) -> str:
    """The template that a call names or gives; otherwise the model's own, the one for tools if there are any."""
    named = templates if isinstance(templates, dict) else {}
    if wanted is not None:
        return named.get(wanted, wanted)
    if isinstance(templates, str):
        return templates
    template = named.get("tool_use") if has_tools else None
    if template is None:
        template = named.get("default")
    if template is None:
        has = f"only named ones ({', '.join(named)})" if named else "none"
        raise SettingError(
            f"a chat needs a chat template, and this tokenizer has {has}; "
            "pass chat_template=…, or encode plain text, which is what a base model continues"
        )
    return template
