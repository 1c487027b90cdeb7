from unspool import AutoTokenizer, AutoModelForCausalLM, WatermarkDetector, WatermarkingConfig

model_id = "models/gpt2"
model = AutoModelForCausalLM.from_pretrained(model_id)
tok = AutoTokenizer.from_pretrained(model_id)
tok.pad_token_id = tok.eos_token_id
tok.padding_side = "left"

inputs = tok(["This is the beginning of a long story", "Alice and Bob are"], padding=True, return_tensors="pt")
input_len = inputs["input_ids"].shape[-1]

# first generate text with watermark and without
watermarking_config = WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")
out_watermarked = model.generate(**inputs, watermarking_config=watermarking_config, do_sample=False, max_length=40)
out = model.generate(**inputs, do_sample=False, max_length=40)

# now we can instantiate the detector and check the generated text
detector = WatermarkDetector(model_config=model.config, device="cpu", watermarking_config=watermarking_config)
detection_out_watermarked = detector(out_watermarked, return_dict=True)
detection_out = detector(out, return_dict=True)
detection_out_watermarked.prediction

detection_out.prediction
