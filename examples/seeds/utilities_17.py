from unspool import AutoTokenizer, AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/bloom")
tokenizer = AutoTokenizer.from_pretrained("models/bloom")

inputs = tokenizer("Alice and Bob", return_tensors="pt")

# By default, it continues generating according to the model's logits
outputs = model.generate(**inputs, max_new_tokens=5)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])

# We can contrain it with `prefix_allowed_tokens_fn` to force a certain behavior based on a prefix.
# For instance, we can force an entire entity to be generated when its beginning is detected.
entity = tokenizer(" Bob Marley", return_tensors="pt").input_ids[0]  # 3 tokens
def prefix_allowed_tokens_fn(batch_id, input_ids):
    '''
    Attempts to generate 'Bob Marley' when 'Bob' is detected.
    In this case, `batch_id` is not used, but you can set rules for each batch member.
    '''
    if input_ids[-1] == entity[0]:
        return [entity[1].item()]
    elif input_ids[-2] == entity[0] and input_ids[-1] == entity[1]:
        return [entity[2].item()]
    return list(range(tokenizer.vocab_size))  # If no match, allow all tokens

outputs = model.generate(**inputs, max_new_tokens=5, prefix_allowed_tokens_fn=prefix_allowed_tokens_fn)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True)[0])
