from unspool import AutoTokenizer, AutoModelForCausalLM, set_seed

set_seed(1)
model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")

inputs = tokenizer("A sequence: 1, 2", return_tensors="pt")

# With sampling, the output is unexpected -- sometimes too unexpected.
outputs = model.generate(**inputs, do_sample=True)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])

# With epsilon sampling, the output gets restricted to high-probability tokens. Note that this is similar to
# Top P sampling, which restricts tokens based on their cumulative probability.
# Pro tip: The paper recomends using `epsilon_cutoff` values between 3e-4 and 9e-4
outputs = model.generate(**inputs, do_sample=True, epsilon_cutoff=0.1)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])
