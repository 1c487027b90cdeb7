from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/phi")
model = AutoModelForCausalLM.from_pretrained("models/phi")
inputs = tokenizer("The biggest states in the USA by land area:", return_tensors="pt")

gen_out = model.generate(**inputs)
print(tokenizer.batch_decode(gen_out, skip_special_tokens=True)[0])

# Passing one or more stop strings will halt generation after those strings are emitted
# Note that generating with stop strings requires you to pass the tokenizer too
gen_out = model.generate(**inputs, stop_strings=["Texas"], tokenizer=tokenizer)
print(tokenizer.batch_decode(gen_out, skip_special_tokens=True)[0])
