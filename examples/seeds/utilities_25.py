from unspool import AutoTokenizer, AutoModelForCausalLM, set_seed

set_seed(1)
model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")

inputs = tokenizer("A sequence: 1, 2", return_tensors="pt")

# With sampling, the output is unexpected -- sometimes too unexpected.
outputs = model.generate(**inputs, do_sample=True)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])

# With `top_p` sampling, the output gets restricted to high-probability tokens.
# Pro tip: In practice, LLMs use `top_p` in the 0.9-0.95 range.
outputs = model.generate(**inputs, do_sample=True, top_p=0.1)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])
