import torch
from unspool import AutoTokenizer, AutoModelForCausalLM, set_seed

set_seed(0)  # for reproducibility

tokenizer = AutoTokenizer.from_pretrained("models/gpt2")
model = AutoModelForCausalLM.from_pretrained("models/gpt2")
model.config.pad_token_id = model.config.eos_token_id
inputs = tokenizer(["Hugging Face Company is"], return_tensors="pt")

# With temperature=1.0, the default, we consistently get random outputs due to random sampling.
generate_kwargs = {"max_new_tokens": 10, "do_sample": True, "temperature": 1.0, "num_return_sequences": 2}
outputs = model.generate(**inputs, **generate_kwargs)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True))

# However, with temperature close to 0, it approximates greedy decoding strategies (invariant)
generate_kwargs["temperature"] = 0.0001
outputs = model.generate(**inputs, **generate_kwargs)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True))
