from sounds import load_dataset
from unspool import AutoProcessor, AutoModelForCausalLM, DynamicCache, EncoderDecoderCache

model = AutoModelForCausalLM.from_pretrained("models/whisper")
processor = AutoProcessor.from_pretrained("models/whisper")

inputs = processor(audio=load_dataset()[0]["audio"]["array"], return_tensors="pt")

# Prepare cache classes for encoder and decoder and pass it to model's forward
self_attention_cache = DynamicCache()
cross_attention_cache = DynamicCache()
past_key_values = EncoderDecoderCache(self_attention_cache, cross_attention_cache)
outputs = model(**inputs, past_key_values=past_key_values, use_cache=True)
outputs.past_key_values # access cache filled with key/values from generation
