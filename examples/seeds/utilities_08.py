from unspool import AutoTokenizer, AutoModelForSeq2SeqLM

model = AutoModelForSeq2SeqLM.from_pretrained("models/t5")
tokenizer = AutoTokenizer.from_pretrained("models/t5")

inputs = tokenizer("Translate from English to German: I love cats.", return_tensors="pt")

# By default, it continues generating according to the model's logits
outputs = model.generate(**inputs, max_new_tokens=10)
print(tokenizer.batch_decode(outputs)[0])

# We can use `forced_bos_token_id` to force the start of generation with an encoder-decoder model
# (including forcing it to end straight away with an EOS token)
outputs = model.generate(**inputs, max_new_tokens=10, forced_bos_token_id=tokenizer.eos_token_id)
print(tokenizer.batch_decode(outputs)[0])
