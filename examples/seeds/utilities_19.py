from unspool import AutoTokenizer, AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")
inputs = tokenizer(["The full name of Donald is Donald"], return_tensors="pt")

summary_ids = model.generate(inputs["input_ids"], max_new_tokens=4)
print(tokenizer.batch_decode(summary_ids, skip_special_tokens=True)[0])

# Now let's control generation through a bias. Please note that the tokenizer is initialized differently!
tokenizer_with_prefix_space = AutoTokenizer.from_pretrained("models/gpt2", add_prefix_space=True)

def get_tokens(word):
    return tokenizer_with_prefix_space([word], add_special_tokens=False).input_ids[0]

# If we add a negative bias without beam search, it may become "stuck" in a prefix without good continuations
sequence_bias = [get_tokens("Trump"), -10.0]
biased_ids = model.generate(inputs["input_ids"], max_new_tokens=4, sequence_bias=sequence_bias)
print(tokenizer.batch_decode(biased_ids, skip_special_tokens=True)[0])

biased_ids = model.generate(inputs["input_ids"], max_new_tokens=4, num_beams=4, sequence_bias=sequence_bias)
print(tokenizer.batch_decode(biased_ids, skip_special_tokens=True)[0])

# We can also add a positive bias to nudge the model towards specific tokens or continuations
sequence_bias = [get_tokens("Donald Duck"), 10.0]
biased_ids = model.generate(inputs["input_ids"], max_new_tokens=4, num_beams=4, sequence_bias=sequence_bias)
print(tokenizer.batch_decode(biased_ids, skip_special_tokens=True)[0])
