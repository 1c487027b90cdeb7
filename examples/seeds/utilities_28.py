import torch
from unspool import AutoProcessor, WhisperForConditionalGeneration, GenerationConfig
from sounds import load_dataset

processor = AutoProcessor.from_pretrained("models/whisper")
model = WhisperForConditionalGeneration.from_pretrained("models/whisper")
ds = load_dataset("hf-internal-testing/librispeech_asr_dummy", "clean", split="validation")
inputs = processor(ds[3]["audio"]["array"], return_tensors="pt")
input_features = inputs.input_features

#Displaying timestamps
generated_ids = model.generate(inputs=input_features, return_timestamps=True)
transcription = processor.batch_decode(generated_ids, decode_with_timestamps=True)[0]
print("Transcription:", transcription)

#No timestamps & change EOS:
#This allows the user to select a specific token to terminate the sequence on, in this case it's the word "can"(460)
model.generation_config.eos_token_id = 46
generated_ids = model.generate(inputs=input_features,return_timestamps=False)
transcription = processor.batch_decode(generated_ids, skip_special_tokens=True)[0]
print("Transcription:", transcription)
