from unspool import AutoTokenizer, AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")
inputs = tokenizer(["Today I"], return_tensors="pt")

output = model.generate(**inputs)
print(tokenizer.decode(output[0], skip_special_tokens=True))

# Now let's add ngram size using `no_repeat_ngram_size`. This stops the repetitions ("I’m") in the output.
output = model.generate(**inputs, no_repeat_ngram_size=2)
print(tokenizer.decode(output[0], skip_special_tokens=True))
