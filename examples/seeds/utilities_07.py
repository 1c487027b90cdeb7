from unspool import AutoTokenizer, AutoModelForCausalLM, set_seed

model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")

text = "Just wanted to let you know, I"
inputs = tokenizer(text, return_tensors="pt")

# Let's consider that we want short sentences, so we limit `max_length=30`. However, we observe that the answer
# tends to end abruptly.
set_seed(1)
outputs = model.generate(**inputs, do_sample=True, temperature=0.9, max_length=30, pad_token_id=0)
print(tokenizer.batch_decode(outputs)[0])

# To promote the appearance of the EOS token at the right time, we add the `exponential_decay_length_penalty =
# (start_index, decay_factor)`. Instead of cutting at max_tokens, the output comes to an end before and usually
# with more meaning. What happens is that starting from `start_index` the EOS token score will be increased
# by `decay_factor` exponentially. However, if you set a high decay factor, you may also end up with abruptly
# ending sequences.
set_seed(1)
outputs = model.generate(
    **inputs,
    do_sample=True,
    temperature=0.9,
    max_length=30,
    pad_token_id=0,
    exponential_decay_length_penalty=(15, 1.6),
)
print(tokenizer.batch_decode(outputs)[0])

# With a small decay factor, you will have a higher chance of getting a meaningful sequence.
set_seed(1)
outputs = model.generate(
    **inputs,
    do_sample=True,
    temperature=0.9,
    max_length=30,
    pad_token_id=0,
    exponential_decay_length_penalty=(15, 1.01),
)
print(tokenizer.batch_decode(outputs)[0])
