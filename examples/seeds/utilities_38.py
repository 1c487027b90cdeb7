# Run pip install hqq first if you don't have it yet
from unspool import AutoTokenizer, AutoModelForCausalLM, HQQQuantizedCache, QuantizedCacheConfig

model = AutoModelForCausalLM.from_pretrained("models/qwen2")
tokenizer = AutoTokenizer.from_pretrained("models/qwen2")

inputs = tokenizer(text="My name is Qwen2", return_tensors="pt")

# Prepare a cache class and pass it to model's forward
cache_config = QuantizedCacheConfig(nbits=4, axis_key=1, axis_value=1)
past_key_values = HQQQuantizedCache(cache_config=cache_config)
outputs = model(**inputs, past_key_values=past_key_values, use_cache=True)
outputs.past_key_values # access cache filled with key/values from generation
