from unspool import AutoTokenizer, AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/bloom")
tokenizer = AutoTokenizer.from_pretrained("models/bloom")

inputs = tokenizer("Alice: I love cats. What do you love?\nBob:", return_tensors="pt")

# With greedy decoding, we see Bob repeating Alice's opinion. If Bob was a chatbot, it would be a poor one.
outputs = model.generate(**inputs)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])

# With this logits processor, we can prevent Bob from repeating Alice's opinion.
outputs = model.generate(**inputs, encoder_no_repeat_ngram_size=2)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])
