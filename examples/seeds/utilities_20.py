from unspool import AutoProcessor, WhisperForConditionalGeneration
from sounds import load_dataset

processor = AutoProcessor.from_pretrained("models/whisper")
model = WhisperForConditionalGeneration.from_pretrained("models/whisper")
ds = load_dataset("hf-internal-testing/librispeech_asr_dummy", "clean", split="validation")
inputs = processor(ds[0]["audio"]["array"], return_tensors="pt")

# Whisper has `begin_suppress_tokens` set by default (= `[220, 2]`). 50256 is the EOS token, so this means
# it can't generate and EOS token in the first iteration, but it can in the others.
outputs = model.generate(**inputs, return_dict_in_generate=True, output_scores=True)
print(outputs.scores[0][0, 2])
print(outputs.scores[-1][0, 2])  # in other places we can see some probability mass for EOS

# If we disable `begin_suppress_tokens`, we can generate EOS in the first iteration.
outputs = model.generate(
    **inputs, return_dict_in_generate=True, output_scores=True, begin_suppress_tokens=None
)
print(outputs.scores[0][0, 2])
