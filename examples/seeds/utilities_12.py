from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/bloom")
model = AutoModelForCausalLM.from_pretrained("models/bloom")

inputs = tokenizer("A number:", return_tensors="pt")
gen_out = model.generate(**inputs)
print(tokenizer.batch_decode(gen_out, skip_special_tokens=True)[0])

# setting `min_length` to a value smaller than the uncontrolled output length has no impact
gen_out = model.generate(**inputs, min_length=3)
print(tokenizer.batch_decode(gen_out, skip_special_tokens=True)[0])

# setting a larger `min_length` will force the model to generate beyond its natural ending point, which is not
# necessarily incorrect
gen_out = model.generate(**inputs, min_length=10)
print(tokenizer.batch_decode(gen_out, skip_special_tokens=True)[0])
