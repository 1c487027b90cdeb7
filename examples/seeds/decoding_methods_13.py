from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/qwen2")
model = AutoModelForCausalLM.from_pretrained("models/qwen2", device_map="auto")

inputs = tokenizer(["The quick brown"], return_tensors="pt").to(model.device)
gen_out = model.generate(**inputs, recipe="left_padding_greedy")  # minimal greedy decoding
print(tokenizer.batch_decode(gen_out, skip_special_tokens=True)[0])

gen_out = model.generate(**inputs, recipe="left_padding_greedy", left_padding=5)
print(tokenizer.batch_decode(gen_out)[0])
