from unspool import AutoTokenizer, AutoModelForCausalLM, set_seed

model = AutoModelForCausalLM.from_pretrained("models/bloom")
tokenizer = AutoTokenizer.from_pretrained("models/bloom")

inputs = tokenizer("1, 2, 3", return_tensors="pt")

# We can see that greedy decoding produces a sequence of numbers
outputs = model.generate(**inputs)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])

# For this particular seed, we can see that sampling produces nearly the same low-information (= low entropy)
# sequence
set_seed(18)
outputs = model.generate(**inputs, do_sample=True)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])

# With `typical_p` set, the most obvious sequence is no longer produced, which may be good for your problem
set_seed(18)
outputs = model.generate(
    **inputs, do_sample=True, typical_p=0.1, return_dict_in_generate=True, output_scores=True
)
print(tokenizer.batch_decode(outputs.sequences, skip_special_tokens=True)[0])

# We can see that the token corresponding to "4" (token 934) in the second position, the most likely token
# as seen with greedy decoding, was entirely blocked out
print(outputs.scores[1][0, 34])
