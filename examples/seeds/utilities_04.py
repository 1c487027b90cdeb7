from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/bloom")
model = AutoModelForCausalLM.from_pretrained("models/bloom")

inputs = tokenizer(["Alice and Bob. The third member's name was"], return_tensors="pt")
gen_out = model.generate(**inputs)
print(tokenizer.batch_decode(gen_out, skip_special_tokens=True)[0])

# With the `encoder_repetition_penalty` argument we can trigger this logits processor in `generate`, which can
# promote the use of prompt tokens ("Bob" in this example)
gen_out = model.generate(**inputs, encoder_repetition_penalty=1.2)
print(tokenizer.batch_decode(gen_out, skip_special_tokens=True)[0])
