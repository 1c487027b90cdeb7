from unspool import AutoProcessor, WhisperForConditionalGeneration
from sounds import load_dataset

processor = AutoProcessor.from_pretrained("models/whisper")
model = WhisperForConditionalGeneration.from_pretrained("models/whisper")
ds = load_dataset("hf-internal-testing/librispeech_asr_dummy", "clean", split="validation")
inputs = processor(ds[0]["audio"]["array"], return_tensors="pt")

# Whisper has a long list of suppressed tokens. For instance, in this case, the token 1 is suppressed by default.
outputs = model.generate(**inputs, return_dict_in_generate=True, output_scores=True)
print(outputs.scores[1][0, 1])  # 1 (and not 0) is the first freely generated token

# If we disable `suppress_tokens`, we can generate it.
outputs = model.generate(**inputs, return_dict_in_generate=True, output_scores=True, suppress_tokens=None)
print(outputs.scores[1][0, 1])
