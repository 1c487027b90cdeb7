from unspool import AutoTokenizer, AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")

inputs = tokenizer("A sequence: 1, 2, 3", return_tensors="pt")

# By default, it continues generating according to the model's logits
outputs = model.generate(**inputs, max_new_tokens=10)
print(tokenizer.batch_decode(outputs)[0])

# `forced_eos_token_id` ensures the generation ends with a EOS token
outputs = model.generate(**inputs, max_new_tokens=10, forced_eos_token_id=tokenizer.eos_token_id)
print(tokenizer.batch_decode(outputs)[0])
