from unspool import AutoTokenizer, MambaForCausalLM, MambaCache

model = MambaForCausalLM.from_pretrained("models/mamba")
tokenizer = AutoTokenizer.from_pretrained("models/mamba")

inputs = tokenizer(text="My name is Mamba", return_tensors="pt")

# Prepare a cache class and pass it to model's forward
past_key_values = MambaCache(config=model.config, batch_size=1, device=model.device, dtype=model.dtype)
outputs = model(**inputs, past_key_values=past_key_values, use_cache=True)
outputs.past_key_values
