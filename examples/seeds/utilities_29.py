from unspool import AutoTokenizer, AutoModelForCausalLM, WatermarkingConfig

model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")
inputs = tokenizer(["Alice and Bob are"], return_tensors="pt")

# normal generation
out = model.generate(inputs["input_ids"], max_length=20, do_sample=False)
tokenizer.batch_decode(out, skip_special_tokens=True)[0]

# watermarked generation
watermarking_config = WatermarkingConfig(bias=2.5, context_width=2, seeding_scheme="selfhash")
out = model.generate(inputs["input_ids"], watermarking_config=watermarking_config, max_length=20, do_sample=False)
tokenizer.batch_decode(out, skip_special_tokens=True)[0]

# to detect watermarked text use the WatermarkDetector class
from unspool import WatermarkDetector
detector = WatermarkDetector(model_config=model.config, device="cpu", watermarking_config= watermarking_config)
detection_preds = detector(out)
detection_preds
