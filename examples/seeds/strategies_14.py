from unspool import AutoModelForCausalLM, AutoTokenizer, set_seed
set_seed(42)  # For reproducibility

prompt = "Alice and Bob"
checkpoint = "models/gpt_neox"
assistant_checkpoint = "models/gpt_neox"

tokenizer = AutoTokenizer.from_pretrained(checkpoint)
inputs = tokenizer(prompt, return_tensors="pt")

model = AutoModelForCausalLM.from_pretrained(checkpoint)
assistant_model = AutoModelForCausalLM.from_pretrained(assistant_checkpoint)
outputs = model.generate(**inputs, assistant_model=assistant_model, do_sample=True, temperature=0.5)
tokenizer.batch_decode(outputs, skip_special_tokens=True)
