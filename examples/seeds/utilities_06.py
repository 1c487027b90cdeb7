from unspool import AutoTokenizer, AutoModelForCausalLM, set_seed

set_seed(1)
model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")

inputs = tokenizer("A sequence: 1, 2", return_tensors="pt")

# With sampling, the output is unexpected -- sometimes too unexpected.
outputs = model.generate(**inputs, do_sample=True)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])

# With eta sampling, the output gets restricted to high-probability tokens. You can see it as a dynamic form of
# epsilon sampling that adapts its cutoff probability based on the entropy (high entropy = lower cutoff).
# Pro tip: The paper recomends using `eta_cutoff` values between 3e-4 to 4e-3
outputs = model.generate(**inputs, do_sample=True, eta_cutoff=0.1)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])
