"""Record what transformers answers with the default model's weights: `python -m tests.end_to_end.record_answers`.

The weights are the same file, dequantised by transformers' own reader, in float32; decoding is greedy.
"""

from __future__ import annotations

import json
from pathlib import Path

ANSWERS = Path(__file__).parent / "smollm2_answers.json"
MAX_NEW_TOKENS = 48
PLAIN = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\n",
    "The quick brown fox",
    "In 1969, astronauts",
    "Ingredients: flour, sugar, eggs.\nInstructions:",
]
CHAT = [
    "What is the capital of Japan?",
    "Write a haiku about a lighthouse.",
    "Explain gravity to a child in two sentences.",
    "List three fruits.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "What is 7 times 8?",
    "Give me a name for a cat.",
    "Who wrote Romeo and Juliet?",
    "Say hello in a friendly way. 😊",
]


def main() -> None:
    """Ask transformers and write the file."""
    import torch
    import transformers

    from unspool.loading.catalogue import find_model

    path = find_model("smollm2-135m")
    assert path is not None
    options = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    cases = []
    for kind, prompts in (("plain", PLAIN), ("chat", CHAT)):
        for prompt in prompts:
            if kind == "chat":
                messages = [{"role": "user", "content": prompt}]
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            else:
                text = prompt
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            start = inputs["input_ids"].shape[1]
            cases.append(
                {
                    "kind": kind,
                    "prompt": prompt,
                    "prompt_ids": inputs["input_ids"][0].tolist(),
                    "new_ids": output[0, start:].tolist(),
                    "text": tokenizer.decode(output[0, start:], skip_special_tokens=True),
                }
            )
            print(f"{kind}: {prompt!r} -> {cases[-1]['text']!r}")
    content = {"transformers": transformers.__version__, "max_new_tokens": MAX_NEW_TOKENS, "cases": cases}
    ANSWERS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
