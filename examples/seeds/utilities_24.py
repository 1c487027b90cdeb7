from unspool import AutoTokenizer, AutoModelForCausalLM, set_seed

set_seed(1)
model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")

inputs = tokenizer("A sequence: A, B, C, D", return_tensors="pt")

# With sampling, the output is unexpected -- sometimes too unexpected.
outputs = model.generate(**inputs, do_sample=True)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])

# With `top_k` sampling, the output gets restricted the k most likely tokens.
# Pro tip: In practice, LLMs use `top_k` in the 5-50 range.
outputs = model.generate(**inputs, do_sample=True, top_k=2)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])
