from unspool import AutoTokenizer, AutoModelForCausalLM

# Initializing the model and tokenizer for it
model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")
inputs = tokenizer(["I'm not going to"], return_tensors="pt")

# This shows a normal generate without any specific parameters
summary_ids = model.generate(**inputs)
print(tokenizer.batch_decode(summary_ids, skip_special_tokens=True)[0])

# This generates a penalty for repeated tokens
penalized_ids = model.generate(**inputs, repetition_penalty=1.1)
print(tokenizer.batch_decode(penalized_ids, skip_special_tokens=True)[0])
